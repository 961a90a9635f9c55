#!/bin/sh
# Packs what packaging/build.sh built: the DEBs and RPMs of npu-dra and npuctl.
#
#   packaging/pack.sh ARCH [DIST [RELEASE]]      x86_64 or aarch64; dist; 1
#
# RELEASE is the packages' own number behind the version: tests of upgrades pack the same programs twice. Another one than 1
# also changes the settings file by a line, so that an upgrade has something to keep.
set -eu
cd "$(dirname "$0")/.."
. packaging/common.sh

arch=${1:?which architecture: x86_64 or aarch64}
dist=${2:-dist}
release=${3:-1}
version=$(workspace_version)
programs=$PWD/target/packages/$arch
for file in npu-dra npuctl pages/npuctl.1; do
    [ -e "$programs/$file" ] || die "$programs/$file is missing: run packaging/build.sh first"
done
case $arch in
x86_64) deb_arch=amd64 ;;
aarch64) deb_arch=arm64 ;;
*) die "no packages are made for $arch" ;;
esac
packaging/tools.sh pack

# The time in all files: that of the last entry of the changelog, which is the same on every machine.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(dpkg-parsechangelog --file packaging/debian/changelog --show-field Timestamp)}
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$dist"
dist=$(cd "$dist" && pwd)

# A copy holds what is packed and nothing else; neither tool writes into the checkout.
tree=$work/npu-dra-$version
mkdir "$tree"
cp -R README.md README-zh.md LICENSE Cargo.toml docs etc packaging systemd "$tree"
cp -R packaging/debian "$tree/debian"
if [ "$release" != 1 ]; then
    sed -i "1s/(.*)/($version-$release)/" "$tree/debian/changelog"
    printf '\n# As packaged in release %s.\n' "$release" >>"$tree/etc/npu-dra/npu-dra.toml"
fi

echo "packaging: DEB $version-$release $deb_arch" >&2
(cd "$tree" && PROGRAMS=$programs dpkg-buildpackage -b -us -uc -d -a"$deb_arch") >"$work/deb.log" 2>&1 ||
    { cat "$work/deb.log" >&2; die 'the DEBs could not be made'; }

echo "packaging: RPM $version-$release $arch" >&2
rpmbuild -bb --target "$arch" --define "_topdir $work/rpm" --define "tree $tree" \
    --define "npu_version $version" --define "npu_release $release" \
    --define "programs $programs" \
    "$tree/packaging/rpm/npu-dra.spec" >"$work/rpm.log" 2>&1 ||
    { cat "$work/rpm.log" >&2; die 'the RPMs could not be made'; }

rm -f "$dist"/*_"$deb_arch".deb "$dist"/*."$arch".rpm
for package in "$work"/*.deb "$work"/rpm/RPMS/*/*.rpm; do
    install -m 0644 "$package" "$dist/"
    echo "$dist/${package##*/}"
done
