#!/bin/sh
# Runs rustc for cargo, with the directories of this machine named as everywhere. Not by RUSTFLAGS: cargo puts those into
# the names of directories, and generated code bears these.
IFS='
'
for pair in $REMAP; do
    set -- "$@" "--remap-path-prefix=$pair"
done
exec "$@"
