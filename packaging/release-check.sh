#!/bin/sh
# What is checked before a release, and takes too long for continuous integration:
#
#   packages   The packages of both architectures are made, and are clean.
#   bytes      A second build, of a copy of the source in another directory, offline and from `cargo vendor`, gives the same
#              bytes.
#   source     The source builds as a distribution builds it: debian/rules and the spec, offline, without programs that were
#              built before.
#   aarch64    The layout test of the vendor's ABI and the demo pass for aarch64, under qemu (C's char has no sign there).
#
# With some of these words as arguments: only these. The results are printed, and added to target/release-check.txt.
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

packages() {
    for arch in x86_64 aarch64; do
        make packages ARCH=$arch
    done
    for package in dist/*; do
        say "made and clean: ${package##*/}, $(stat -c %s "$package") bytes"
    done
}

bytes() {
    copy=$work/another-place/npu-dra
    source_copy "$copy"
    for arch in x86_64 aarch64; do
        (cd "$copy" && OFFLINE=1 packaging/build.sh $arch && packaging/pack.sh $arch dist)
    done
    different=''
    for package in dist/*; do
        name=${package##*/}
        if cmp -s "$package" "$copy/dist/$name"; then
            say "same bytes, built offline elsewhere: $name, sha256 $(sha256sum "$package" | cut -c1-16)…"
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

# Runs a command without network, with cargo and rustc by their own names: rustup's look for their settings in HOME.
offline() { # command…
    PATH="$(rustc --print sysroot)/bin:$PATH" CARGO_HOME="$work/no-cargo-home" LC_ALL=C unshare --user --map-root-user --net "$@"
}

# Owner, mode and name of each file. The time and size of what is built elsewhere may differ.
files_of() { # package
    case $1 in
    *.deb) dpkg-deb --contents "$1" | awk '{ print $1, $2, $6 }' ;;
    *.rpm) rpm --query --package --nosignature --queryformat '[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILENAMES}\n]' "$1" ;;
    esac | sort
}

source_builds() {
    name=npu-dra-$(workspace_version)
    crates=$(vendored_crates)
    tree=$work/source/$name
    source_copy "$tree"
    mkdir -p "$tree/.cargo" "$tree/vendor" target/source
    # One directory for what both build, so that the second takes the crates of the first.
    ln -s "$PWD/target/source" "$tree/target"
    printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "%s"\n' "$crates" >"$tree/.cargo/config.toml"
    mkdir -p "$work/rpm/SOURCES"
    tar -C "$work/source" --exclude=.cargo --exclude=vendor -czf "$work/rpm/SOURCES/$name.tar.gz" "$name"
    # Not the crates themselves: the file names their directory.
    tar -C "$tree" -czf "$work/rpm/SOURCES/$name-vendor.tar.gz" .cargo vendor

    cp -R packaging/debian "$tree/debian"
    (cd "$tree" && offline dpkg-buildpackage -b -us -uc -d) >"$work/deb.log" 2>&1 ||
        { tail -n 50 "$work/deb.log" >&2; die 'debian/rules does not build the source'; }
    # The distribution's own packages of cargo and gcc are what --nodeps leaves out.
    offline rpmbuild -bb --nodeps --define "_topdir $work/rpm" packaging/rpm/npu-dra.spec >"$work/rpm.log" 2>&1 ||
        { tail -n 50 "$work/rpm.log" >&2; die 'the spec does not build the source'; }
    for package in "$work"/source/*.deb "$work"/rpm/RPMS/*/*.rpm; do
        made=dist/${package##*/}
        [ -f "$made" ] || die "a source build makes ${package##*/}, which is not in dist: run make packages first"
        files_of "$made" >"$work/expected"
        files_of "$package" >"$work/found"
        diff -u "$work/expected" "$work/found" >&2 || die "a source build puts other files into ${package##*/}"
        say "built from source, offline, with the same files: ${package##*/}"
    done
}

aarch64_tests() {
    [ -x target/packages/aarch64/npu-dra ] || packaging/build.sh aarch64
    # With the root's own compiler and without optimization: these are for this check only. All in one build.
    cross="env HOST_CC=gcc CC=aarch64-linux-gnu-gcc CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc"
    set -- --locked --target aarch64-unknown-linux-gnu --package npu-dra --package testkit --package fake-dcmi --test it --test abi
    # shellcheck disable=SC2086 # words
    in_cross_root $cross cargo build "$@" --lib --bin testkit
    # The driver's declarations, and those of the simulated library, against C.
    # shellcheck disable=SC2086 # words
    in_cross_root $cross cargo test "$@" every_size_offset_and_constant | tee "$work/test"
    [ "$(grep -c 'test result: ok\. 1 passed' "$work/test")" = 2 ] || die 'the layout test of the ABI does not pass for aarch64'
    say 'aarch64: every size, offset and constant of the ABI is what a C compiler for aarch64 makes of it'
    # The programs of the packages, beside the simulated node.
    stage=target/cross/demo built=target/cross/aarch64-unknown-linux-gnu/debug
    rm -rf "$stage"
    mkdir -p "$stage"
    cp target/packages/aarch64/npu-dra target/packages/aarch64/npuctl "$built/testkit" "$built/libdcmi.so" "$stage"
    in_cross_root "$stage/testkit" demo | tee "$work/demo"
    [ "$(tail -n 1 "$work/demo")" = 'demo: ok' ] || die 'the demo does not pass for aarch64'
    say 'aarch64: the demo passes with the programs of the packages'
}

report=$PWD/target/release-check.txt
mkdir -p target
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ $# != 0 ] || { rm -f "$report" && set -- packages bytes source aarch64; }
for part in "$@"; do
    case $part in
    packages) packages ;;
    bytes) bytes ;;
    source) source_builds ;;
    aarch64) aarch64_tests ;;
    *) die "release-check has no part $part" ;;
    esac
done
say "passed: $*"
