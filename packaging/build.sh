#!/bin/sh
# Builds npu-dra and npuctl for packages: glibc 2.28 or later, no path of this machine in the result.
#
#   packaging/build.sh ARCH        x86_64 or aarch64; the programs are put into target/packages/ARCH
#
# cargo-zigbuild links against glibc 2.28, whatever this machine has; it comes from PyPI, into the user's cache directory.
set -eu
cd "$(dirname "$0")/.."
. packaging/common.sh

arch=${1:?which architecture: x86_64 or aarch64}
target=$arch-unknown-linux-gnu
out=target/packages/$arch

zig=$(zig_environment)
cargo_home=${CARGO_HOME:-$HOME/.cargo}
# Of two that match, rustc takes the last. Crates have the same name from a registry and from `cargo vendor --versioned-dirs`.
flags="--remap-path-prefix=$PWD=/src/npu-dra --remap-path-prefix=$PWD/vendor=/src/crates"
for registry in "$cargo_home"/registry/src/*/; do
    [ -d "$registry" ] || continue
    flags="$flags --remap-path-prefix=${registry%/}=/src/crates"
done

export PATH="$zig/bin:$PATH" RUSTFLAGS="$flags" CARGO_PROFILE_RELEASE_STRIP=symbols
export CFLAGS="-ffile-prefix-map=$PWD/vendor=/src/crates -ffile-prefix-map=$cargo_home/registry/src=/src/crates"
set -- zigbuild --release --locked --target "$target.$GLIBC_FLOOR" --package npu-dra --package npuctl
"$zig/bin/cargo-zigbuild" "$@"

mkdir -p "$out"
for program in npu-dra npuctl; do
    install -m 0755 "target/$target/release/$program" "$out/$program"
    check_glibc_floor "$out/$program"
done
