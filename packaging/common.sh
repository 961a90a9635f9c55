# What the packaging scripts share; read by `.`, with the checkout's root as the current directory.

# The oldest glibc that the programs run with: EL 8, openEuler 20.03.
GLIBC_FLOOR=2.28
ZIGLANG=0.17.1
CARGO_ZIGBUILD=0.24.1

CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/npu-dra/packages

die() { # text
    printf 'packaging: %s\n' "$1" >&2
    exit 1
}

workspace_version() {
    sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml
}

# Makes the cached virtualenv with cargo-zigbuild and zig if it is not there; prints its directory.
zig_environment() {
    dir=$CACHE/zig-$ZIGLANG-$CARGO_ZIGBUILD
    if [ ! -x "$dir/bin/cargo-zigbuild" ]; then
        command -v python3 >/dev/null 2>&1 || die 'python3 is missing (apt-get install python3-venv; dnf install python3)'
        echo "packaging: getting cargo-zigbuild $CARGO_ZIGBUILD and zig $ZIGLANG into $dir" >&2
        rm -rf "$dir" "$dir.new"
        mkdir -p "$CACHE"
        python3 -m venv "$dir.new" >&2 || die 'python3 cannot make a virtualenv (apt-get install python3-venv)'
        "$dir.new/bin/python3" -m pip install --quiet "ziglang==$ZIGLANG" "cargo-zigbuild==$CARGO_ZIGBUILD" >&2
        mv "$dir.new" "$dir"
    fi
    printf '%s\n' "$dir"
}

# Puts all crates of Cargo.lock into a directory of the cache, if they are not there; prints it.
vendored_crates() {
    dir=$CACHE/crates-$(sha256sum Cargo.lock | cut -c1-16)
    if [ ! -d "$dir" ]; then
        echo "packaging: getting all crates into $dir" >&2
        rm -rf "$CACHE"/crates-* # those of other lock files too
        mkdir -p "$CACHE"
        cargo vendor --quiet --locked --versioned-dirs "$dir.new" >/dev/null
        mv "$dir.new" "$dir"
    fi
    printf '%s\n' "$dir"
}

# Makes the cached root with a Rust that has the standard library of aarch64, if it is not there; prints it.
cross_root() {
    dir=$CACHE/cross-root-1
    if [ ! -d "$dir" ]; then
        [ "$(id -u)" = 0 ] || die 'a root for cross-building is made by root only; run it with sudo'
        packaging/tools.sh cross
        echo "packaging: making a root of Debian forky for cross-building in $dir (once)" >&2
        rm -rf "$dir.new"
        mkdir -p "$CACHE"
        # Its Release file ages between releases.
        mmdebstrap --quiet --variant=minbase --architectures=amd64,arm64 --skip=check/qemu \
            --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='Acquire::Retries "3"' \
            --include=rustc,cargo,libstd-rust-dev:arm64,gcc,libc6-dev,gcc-aarch64-linux-gnu,libc6-dev:arm64,qemu-user-static \
            forky "$dir.new" >&2
        mkdir -p "$dir.new/src/npu-dra" "$dir.new/src/crates" "$dir.new/src/zig"
        mv "$dir.new" "$dir"
    fi
    printf '%s\n' "$dir"
}

# Runs a command in the root for cross-building, in the checkout, without network. Programs for aarch64 run there: they
# are given to qemu by a binfmt of this user namespace alone, which takes Linux 6.7. Nothing of the host is changed.
in_cross_root() { # command…
    root=$(cross_root) crates=$(vendored_crates) zig=$(zig_environment)
    unshare --user --map-root-user --mount --pid --fork --net --kill-child sh -euc '
        root=$1 crates=$2 zig=$3
        shift 3
        mount --rbind /dev "$root/dev"
        mount -t proc proc "$root/proc"
        mount -t tmpfs tmpfs "$root/tmp"
        mount --bind . "$root/src/npu-dra"
        mount --bind "$crates" "$root/src/crates"
        mount --bind "$zig" "$root/src/zig"
        ip link set lo up 2>/dev/null || true
        if mount -t binfmt_misc binfmt_misc "$root/mnt" 2>/dev/null; then
            # An ELF header of 64 bits, little-endian, executable or shared, for machine 183.
            magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
            mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
            printf "%s" ":aarch64:M::$magic:$mask:$root/usr/bin/qemu-aarch64:F" >"$root/mnt/register"
        fi
        mkdir "$root/tmp/cargo"
        printf "[source.crates-io]\nreplace-with = \"vendored\"\n[source.vendored]\ndirectory = \"/src/crates\"\n" \
            >"$root/tmp/cargo/config.toml"
        exec chroot "$root" env -i PATH=/src/zig/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp CARGO_HOME=/tmp/cargo \
            CARGO_TARGET_DIR=/src/npu-dra/target/cross CARGO_NET_OFFLINE=true LC_ALL=C.UTF-8 \
            sh -euc "cd /src/npu-dra; exec \"\$@\"" sh "$@"
    ' sh "$root" "$crates" "$zig" "$@"
}

# Fails if the program needs a newer glibc than the floor, or a library that is not glibc's.
check_glibc_floor() { # program
    newest=$(LC_ALL=C readelf --version-info --wide "$1" | grep -o 'GLIBC_[0-9][0-9.]*' | sed 's/GLIBC_//' | sort -Vu | tail -n 1)
    oldest=$(printf '%s\n%s\n' "$newest" "$GLIBC_FLOOR" | sort -V | tail -n 1)
    [ "$oldest" = "$GLIBC_FLOOR" ] || die "$1 needs glibc $newest, and the floor is $GLIBC_FLOOR"
    for library in $(LC_ALL=C readelf --dynamic --wide "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
        case $library in
        libc.so.6 | libm.so.6 | libdl.so.2 | libpthread.so.0 | librt.so.1 | ld-linux-*) ;;
        *) die "$1 needs $library, which is not glibc's" ;;
        esac
    done
    echo "packaging: $1 needs glibc $newest (floor $GLIBC_FLOOR)" >&2
}
