#!/bin/sh
# Checks what make cluster-test needs before anything is built; installs mmdebstrap where it can and says so. Exits 2 if
# something is missing.
set -eu

if [ "$(id -u)" != 0 ]; then
    echo 'make cluster-test needs root, because it makes namespaces, mounts and device nodes: run it as root' >&2
    exit 2
fi
missing=0
if ! command -v go >/dev/null 2>&1; then
    echo 'missing program: go, 1.26 or later, to build Kubernetes: get it from https://go.dev/dl' >&2
    missing=1
fi
if ! command -v mmdebstrap >/dev/null 2>&1; then
    if command -v apt-get >/dev/null 2>&1; then
        echo 'installing mmdebstrap, which makes the root of the test node'
        apt-get update -qq && apt-get install -y -qq mmdebstrap || missing=1
    fi
fi
for program in mmdebstrap unshare nsenter setsid flock mount ip tar; do
    if ! command -v "$program" >/dev/null 2>&1; then
        printf 'missing program: %s; Debian, Ubuntu: apt-get install mmdebstrap util-linux mount iproute2 tar\n' "$program" >&2
        missing=1
    fi
done
[ "$missing" = 0 ] || exit 2
