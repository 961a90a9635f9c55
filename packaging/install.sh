#!/bin/sh
# Lays out all files of both packages.
#
#   packaging/install.sh DESTDIR PROGRAMS ZSH_DIR
#
# PROGRAMS is the directory of npu-dra and npuctl, with the pages that packaging/generate.sh wrote beside them. ZSH_DIR is
# where the distribution has completions for zsh.
set -eu
cd "$(dirname "$0")/.."
dest=$1 programs=$2 zsh=$3

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

for page in "$programs"/pages/*.[1-9]; do
    put 0644 "$page" "/usr/share/man/man${page##*.}/${page##*/}"
done
put 0644 "$programs/pages/npuctl.bash" /usr/share/bash-completion/completions/npuctl
put 0644 "$programs/pages/npuctl.zsh" "$zsh/_npuctl"
put 0644 "$programs/pages/npuctl.fish" /usr/share/fish/vendor_completions.d/npuctl.fish
