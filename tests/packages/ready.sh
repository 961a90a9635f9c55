#!/bin/sh
# Checks what make package-test needs before anything is built. Exits 2 if something is missing.
set -eu
. tests/lab/ready.sh

needs_root 'make package-test'
if ! ls dist/npu-dra_*.deb dist/npu-dra-*.rpm >/dev/null 2>&1; then
    echo 'there are no packages in dist/: run make packages first' >&2
    exit 2
fi
needs_machines
