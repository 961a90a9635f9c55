#!/bin/sh
# What is checked before a release, and takes too long for continuous integration:
#
# 1. The packages of both architectures are made, and are clean.
# 2. A second build, of a copy of the source in another directory, offline and from `cargo vendor`, gives the same bytes.
# 3. The layout test of the vendor's ABI and the demo pass for aarch64, under qemu (C's char has no sign there).
#
# `aarch64` as argument: only 3. Its results are printed, and put into target/release-check.txt.
set -eu
cd "$(dirname "$0")/.."
. packaging/common.sh

say() {
    echo "release-check: $1" | tee -a "$report"
}

# A copy of what git has, so that nothing else can be in the build.
source_copy() { # directory
    mkdir -p "$1"
    git ls-files -z | xargs -0 cp --parents --target-directory="$1" --no-dereference
}

reproducible() {
    for arch in x86_64 aarch64; do
        make packages ARCH=$arch
    done
    copy=$work/another-place/npu-dra
    source_copy "$copy"
    for arch in x86_64 aarch64; do
        (cd "$copy" && OFFLINE=1 packaging/build.sh $arch && packaging/pack.sh $arch dist)
    done
    different=''
    for package in dist/*; do
        name=${package##*/}
        size=$(stat -c %s "$package")
        if cmp -s "$package" "$copy/dist/$name"; then
            say "same bytes, built offline elsewhere: $name, $size bytes, sha256 $(sha256sum "$package" | cut -c1-16)…"
        else
            different="$different $name"
        fi
    done
    if [ -n "$different" ]; then
        rm -rf target/other-bytes
        cp -R "$copy/dist" target/other-bytes
        die "a second build gives other bytes:$different (kept in target/other-bytes)"
    fi
}

aarch64_tests() {
    # With the root's own compiler: these are for this check only, so they need not run with an old glibc.
    target=aarch64-unknown-linux-gnu
    cross="env CC=aarch64-linux-gnu-gcc CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc"
    in_cross_root $cross cargo build --locked --target $target --package testkit --package fake-dcmi
    in_cross_root $cross cargo test --locked --target $target --package fake-dcmi --test abi
    in_cross_root $cross cargo test --locked --target $target --package npu-dra --test it abi::
    say 'aarch64: every size, offset and constant of the ABI is what a C compiler for aarch64 makes of it'
    # The programs of the packages, beside the simulated node.
    stage=target/cross/demo
    rm -rf "$stage"
    mkdir -p "$stage"
    cp target/packages/aarch64/npu-dra target/packages/aarch64/npuctl "target/cross/$target/debug/testkit" \
        "target/cross/$target/debug/libdcmi.so" "$stage"
    in_cross_root "$stage/testkit" demo | tee "$work/demo"
    [ "$(tail -n 1 "$work/demo")" = 'demo: ok' ] || die 'the demo does not pass for aarch64'
    say 'aarch64: the demo passes with the programs of the packages'
}

report=$PWD/target/release-check.txt
mkdir -p target
: >"$report"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case ${1:-all} in
all)
    reproducible
    aarch64_tests
    ;;
aarch64)
    [ -x target/packages/aarch64/npu-dra ] || packaging/build.sh aarch64
    aarch64_tests
    ;;
*) die "release-check has no part $1" ;;
esac
say 'passed'
