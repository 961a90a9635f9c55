#!/bin/sh
# Makes sure that the programs are there that a step needs; installs them where it may, else says how to get them.
#
#   packaging/tools.sh pack | check | cross
set -eu

case ${1:?pack, check or cross} in
pack) programs='dpkg-buildpackage dh rpmbuild readelf' packages='dpkg-dev debhelper rpm binutils' ;;
check) programs='lintian rpmlint systemd-analyze man' packages='lintian rpmlint systemd man-db' ;;
cross) programs='mmdebstrap unshare' packages='mmdebstrap util-linux arch-test' ;;
*) echo "packaging: no step is called $1" >&2 && exit 2 ;;
esac

lacking() {
    for program in $programs; do
        command -v "$program" >/dev/null 2>&1 || echo "$program"
    done
}

missing=$(lacking)
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    # shellcheck disable=SC2086 # words
    echo "packaging: installing" $packages "for" $missing >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get -o DPkg::Lock::Timeout=300 update -qq
    # shellcheck disable=SC2086 # words
    apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends $packages >/dev/null
    missing=$(lacking)
fi
[ -z "$missing" ] || {
    # shellcheck disable=SC2086 # words
    echo "packaging: missing:" $missing >&2
    echo "  Debian 12 or later, Ubuntu 24.04 or later: apt-get install $packages" >&2
    exit 1
}
