#!/bin/sh
# Builds npu-dra and npuctl for packages: glibc 2.28 or later, no path of this machine in the result.
#
#   packaging/build.sh ARCH        x86_64 or aarch64; the programs are put into target/packages/ARCH
#
# cargo-zigbuild links against glibc 2.28, whatever this machine has; it comes from PyPI, into the user's cache directory.
# For another architecture than this machine's it runs in a root of its own, which has that standard library.
# OFFLINE=1 takes all crates from `cargo vendor` and no network.
set -eu
cd "$(dirname "$0")/.."
. packaging/common.sh

arch=${1:?which architecture: x86_64 or aarch64}
target=$arch-unknown-linux-gnu
out=target/packages/$arch
zig=$(zig_environment)

# The same words everywhere, so that the same source gives the same bytes.
set -- zigbuild --release --locked --target "$target.$GLIBC_FLOOR" --package npu-dra --package npuctl
remap() { # directory, name
    REMAP="$REMAP
$1=$2"
    CFLAGS="$CFLAGS -ffile-prefix-map=$1=$2"
}
REMAP='' CFLAGS='' RUSTFLAGS=''
export REMAP CFLAGS RUSTFLAGS CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_INCREMENTAL=0

case $arch in
"$(uname -m)")
    # Of two that match, rustc takes the last.
    remap "$PWD" /src/npu-dra
    # Crates have the same names from a registry and from `cargo vendor --versioned-dirs`.
    for registry in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/; do
        [ ! -d "$registry" ] || remap "${registry%/}" /src/crates
    done
    if [ -n "${OFFLINE:-}" ]; then
        crates=$(vendored_crates)
        remap "$crates" /src/crates
        export CARGO_NET_OFFLINE=true
        set -- "$@" --config 'source.crates-io.replace-with="vendored"' --config "source.vendored.directory='$crates'"
        set -- unshare --user --map-root-user --net "$zig/bin/cargo-zigbuild" "$@"
    else
        set -- "$zig/bin/cargo-zigbuild" "$@"
    fi
    PATH="$zig/bin:$PATH" RUSTC_WRAPPER=$PWD/packaging/rustc.sh "$@"
    built=target/$target/release generate=packaging/generate.sh
    ;;
aarch64)
    python=$(cd "$zig/lib" && echo python3*)
    in_cross_root env CARGO_ZIGBUILD_ZIG_PATH="/src/zig/lib/$python/site-packages/ziglang/zig" \
        CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_INCREMENTAL=0 cargo-zigbuild "$@"
    built=target/cross/$target/release generate='in_cross_root packaging/generate.sh'
    ;;
*) die "no packages are built for $arch on $(uname -m)" ;;
esac

mkdir -p "$out"
for program in npu-dra npuctl; do
    install -m 0755 "$built/$program" "$out/$program"
    check_glibc_floor "$out/$program"
done
$generate "$out"
