#!/bin/sh
# Checks that the build's few needs are met; installs a C compiler where it can, else says how to get each thing.
set -eu

missing=0
lacks() { # what, how
    printf 'missing: %s\n  %s\n' "$1" "$2" >&2
    missing=1
}

if ! command -v cc >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        apt-get update -qq && apt-get install -y -qq gcc libc6-dev
    elif [ "$(id -u)" = 0 ] && command -v dnf >/dev/null 2>&1; then
        dnf install -y -q gcc glibc-devel
    fi
fi
command -v cc >/dev/null 2>&1 ||
    lacks 'a C compiler (cc)' 'Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora, openEuler: dnf install gcc glibc-devel'

wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
how="get it from https://rustup.rs, or from your distribution if it has Rust $wanted or later"
if ! command -v cargo >/dev/null 2>&1; then
    lacks "cargo, Rust $wanted or later" "$how"
else
    found=$(cargo --version | cut -d' ' -f2)
    oldest=$(printf '%s\n%s\n' "$wanted" "$found" | sort -V | head -n 1)
    [ "$oldest" = "$wanted" ] || lacks "Rust $wanted or later; this is $found" "rustup update, or $how"
fi
exit $missing
