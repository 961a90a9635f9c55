# shellcheck shell=sh
# What the tiers that boot machines need, for their ready.sh to source. Exit 2 if something is missing.

# Ends the script unless this is root.
needs_root() { # command
    [ "$(id -u)" = 0 ] && return
    echo "$1 needs root, because it makes namespaces, mounts and device nodes: run it as root" >&2
    exit 2
}

# Ends the script if a program is missing that a machine needs; installs mmdebstrap where it can and says so.
needs_machines() {
    missing=0
    if ! command -v mmdebstrap >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1; then
        echo 'installing mmdebstrap, which makes the roots of the test machines'
        apt-get update -qq && apt-get install -y -qq mmdebstrap || missing=1
    fi
    for program in mmdebstrap unshare nsenter setsid flock mount ip tar; do
        if ! command -v "$program" >/dev/null 2>&1; then
            printf 'missing program: %s; Debian, Ubuntu: apt-get install mmdebstrap util-linux mount iproute2 tar\n' "$program" >&2
            missing=1
        fi
    done
    [ "$missing" = 0 ] || exit 2
}
