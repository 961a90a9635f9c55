#!/bin/sh
# Checks what make package-test needs before anything is built; installs mmdebstrap where it can and says so. Exits 2 if
# something is missing.
set -eu

if [ "$(id -u)" != 0 ]; then
    echo 'make package-test needs root, because it makes namespaces, mounts and device nodes: run it as root' >&2
    exit 2
fi
if ! ls dist/npu-dra_*.deb dist/npu-dra-*.rpm >/dev/null 2>&1; then
    echo 'there are no packages in dist/: run make packages first' >&2
    exit 2
fi
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
