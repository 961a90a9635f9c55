#!/bin/sh
# Checks what make cluster-test needs before anything is built. Exits 2 if something is missing.
set -eu
. tests/lab/ready.sh

needs_root 'make cluster-test'
if ! command -v go >/dev/null 2>&1; then
    echo 'missing program: go, 1.26 or later, to build Kubernetes: get it from https://go.dev/dl' >&2
    exit 2
fi
needs_machines
