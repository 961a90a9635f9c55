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
