#!/bin/sh
# Lays out all files of both packages.
#
#   packaging/install.sh DESTDIR PROGRAMS RUN ZSH_DIR
#
# PROGRAMS is the directory of npu-dra and npuctl that are installed, RUN that of the same programs for this machine: they
# write their manual pages and completions themselves. ZSH_DIR is where the distribution has completions for zsh.
set -eu
cd "$(dirname "$0")/.."
dest=$1 programs=$2 run=$3 zsh=$4

put() { # mode, file, place
    install -D -m "$1" "$2" "$dest$3"
}

put 0755 "$programs/npu-dra" /usr/sbin/npu-dra
put 0755 "$programs/npuctl" /usr/bin/npuctl

put 0644 systemd/npu-dra.service /usr/lib/systemd/system/npu-dra.service
put 0644 systemd/npu-dra.socket /usr/lib/systemd/system/npu-dra.socket
put 0644 systemd/90-npu-dra.preset /usr/lib/systemd/system-preset/90-npu-dra.preset
put 0644 systemd/npu-dra.sysusers /usr/lib/sysusers.d/npu-dra.conf
put 0644 systemd/npu-dra.tmpfiles /usr/lib/tmpfiles.d/npu-dra.conf
put 0644 systemd/npu-dra-strict.conf /usr/share/npu-dra/npu-dra-strict.conf
for manifest in packaging/manifests/*.yaml; do
    put 0644 "$manifest" "/usr/share/npu-dra/manifests/${manifest##*/}"
done

put 0644 etc/npu-dra/npu-dra.toml /etc/npu-dra/npu-dra.toml
install -d -m 0755 "$dest/etc/npu-dra/npu-dra.toml.d"

pages=$(mktemp -d)
trap 'rm -rf "$pages"' EXIT
"$run/npu-dra" generate man "$pages"
"$run/npuctl" generate man "$pages"
for page in "$pages"/*; do
    put 0644 "$page" "/usr/share/man/man${page##*.}/${page##*/}"
done
for shell in bash zsh fish; do
    "$run/npuctl" completion $shell >"$pages/$shell"
done
put 0644 "$pages/bash" /usr/share/bash-completion/completions/npuctl
put 0644 "$pages/zsh" "$zsh/_npuctl"
put 0644 "$pages/fish" /usr/share/fish/vendor_completions.d/npuctl.fish
