#!/bin/sh
# Checks units, manual pages and packages with the distributions' own tools; every finding is an error.
#
#   packaging/check.sh units                    the files of systemd/, and their sandbox
#   packaging/check.sh packages DEB|RPM…        lintian, rpmlint, manual pages, owners and modes
set -eu
cd "$(dirname "$0")/.."
. packaging/common.sh
packaging/tools.sh check

# What `systemd-analyze security` may say at most, in tenths; docs/operations.md explains each point that is left.
EXPOSURE=48
EXPOSURE_STRICT=26

exposure() { # unit file, limit
    systemd-analyze security --offline=true --no-pager --threshold="$2" "$1" >"$work/security" ||
        { cat "$work/security" >&2; die "the sandbox of ${1##*/} is more open than $2 tenths"; }
    tail -n 1 "$work/security" | sed 's/^[^A-Za-z]*//; s/ [^0-9A-Za-z]*$//'
}

check_units() {
    # Units name programs by their installed paths; a root that holds just those lets verify find them.
    units=$work/units
    mkdir -p "$units"
    cp systemd/npu-dra.service systemd/npu-dra.socket "$units"
    sed -i 's,/usr/sbin/npu-dra,/bin/true,' "$units/npu-dra.service"
    systemd-analyze verify --man=no --recursive-errors=yes "$units/npu-dra.service" "$units/npu-dra.socket" 2>"$work/verify" ||
        { cat "$work/verify" >&2; die 'systemd-analyze verify refuses the units'; }
    [ ! -s "$work/verify" ] || { cat "$work/verify" >&2; die 'systemd-analyze verify has something to say'; }
    exposure "$units/npu-dra.service" $EXPOSURE
    mkdir -p "$work/strict"
    cat "$units/npu-dra.service" systemd/npu-dra-strict.conf >"$work/strict/npu-dra-strict.service"
    systemd-analyze verify --man=no --recursive-errors=yes "$work/strict/npu-dra-strict.service" 2>"$work/verify" ||
        { cat "$work/verify" >&2; die 'systemd-analyze verify refuses the strict drop-in'; }
    exposure "$work/strict/npu-dra-strict.service" $EXPOSURE_STRICT
    # Each of these makes a mount namespace, and the vendor's kernel driver then takes the service for a container.
    if grep -nE '^(Protect(System|Home|KernelTunables|KernelModules|KernelLogs|ControlGroups|Proc|Hostname|Clock)|Private[A-Za-z]+|ProcSubset|(Read(Write|Only)|Inaccessible|Exec|NoExec)Paths|TemporaryFileSystem|Bind(ReadOnly)?Paths|Root[A-Za-z]+|MountFlags|DynamicUser|LogNamespace)=' systemd/npu-dra.service >&2; then
        die 'npu-dra.service must stay in the mount namespace of the host'
    fi
}

check_pages() { # directory with pages, packed or not
    find "$1" -path '*/man/*' -type f | while read -r page; do
        case $page in *.gz) gzip -dc "$page" >"$work/page" ;; *) cp "$page" "$work/page" ;; esac
        LC_ALL=C.UTF-8 MANROFFSEQ='' MANWIDTH=80 man --warnings -E UTF-8 -l -Tutf8 -Z "$work/page" 2>"$work/man" >/dev/null || true
        [ ! -s "$work/man" ] || { echo "${page##*/}:" >&2; cat "$work/man" >&2; exit 1; }
    done || die 'a manual page is not clean'
}

check_deb() { # package
    # Exceptions, with their reasons, stand in packaging/debian/*.lintian-overrides.
    lintian --fail-on error,warning --tag-display-limit 0 "$1" >"$work/lintian" 2>&1 ||
        { cat "$work/lintian" >&2; die "lintian is not content with ${1##*/}"; }
    rm -rf "$work/root"
    dpkg-deb --extract "$1" "$work/root"
    check_pages "$work/root"
    dpkg-deb --contents "$1" | awk '$2 != "root/root" { print; bad = 1 } END { exit bad }' >&2 ||
        die "not all files of ${1##*/} belong to root"
}

check_rpm() { # package
    rpmlint --config packaging/rpm/rpmlint.toml "$1" >"$work/rpmlint" 2>&1 || { cat "$work/rpmlint" >&2; die "rpmlint is not content with ${1##*/}"; }
    ! grep -qE ': [EW]: ' "$work/rpmlint" || { cat "$work/rpmlint" >&2; die "rpmlint warns of ${1##*/}"; }
    rpm --query --package --nosignature --queryformat '[%{FILEUSERNAME}:%{FILEGROUPNAME} %{FILENAMES}\n]' "$1" |
        awk '$1 != "root:root" { print; bad = 1 } END { exit bad }' >&2 || die "not all files of ${1##*/} belong to root"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step=${1:?units or packages}
shift
case $step in
units) check_units ;;
packages)
    for package in "$@"; do
        case $package in
        *.deb) check_deb "$package" ;;
        *.rpm) check_rpm "$package" ;;
        *) die "$package is neither DEB nor RPM" ;;
        esac
        echo "packaging: ${package##*/}: clean" >&2
    done
    ;;
*) die "no step is called $step" ;;
esac
