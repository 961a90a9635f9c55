#!/bin/sh
# Lets npu-dra and npuctl of a directory write their manual pages and completions, into its folder `pages`.
#
#   packaging/generate.sh PROGRAMS
set -eu
programs=$1
pages=$programs/pages
rm -rf "$pages"
mkdir -p "$pages"
"$programs/npu-dra" generate man "$pages"
"$programs/npuctl" generate man "$pages"
for shell in bash zsh fish; do
    "$programs/npuctl" completion $shell >"$pages/npuctl.$shell"
done
