# Runs as process 1 of a machine's new namespaces and becomes its systemd.
#   inside.sh DIRECTORY
# Beside it lie: root/ (the file system), settings (shell variables), hierarchies (controllers and name of each, one a
# line), binds (source and target), nodes (path, major, minor, mode, group), before (a script for the machine's shell).
# shellcheck shell=sh disable=SC1091,SC2154
dir=$1
# The host's /proc is still mounted, so this is the pid that the host knows.
read -r pid rest </proc/self/stat
: "$rest"
echo "$pid" >"$dir/leader.part"
. "$dir/settings"
root=$dir/root
cd "$root"

mount --bind "$root" "$root"
cd "$root"
mount -t proc -o nosuid,nodev,noexec proc proc
mount -t sysfs -o nosuid,nodev,noexec sysfs sys
mount -o remount,bind,ro sys
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs run
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs tmp
# Nodes of its own, never the host's: a getty would change the owner of the host's.
mount -t tmpfs -o mode=755,nosuid tmpfs dev
node() { # path, major, minor, mode, group
    mkdir -p "$(dirname "dev/$1")"
    mknod -m "$4" "dev/$1" c "$2" "$3"
    chgrp "$5" "dev/$1"
}
node null 1 3 666 0
node zero 1 5 666 0
node full 1 7 666 0
node random 1 8 666 0
node urandom 1 9 666 0
node kmsg 1 11 600 0
node tty 5 0 666 0
node fuse 10 229 666 0
node net/tun 10 200 666 0
node console 1 3 600 0
mkdir dev/pts dev/shm dev/mqueue
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
while read -r path major minor mode group; do
    node "$path" "$major" "$minor" "$mode" "$group"
done <"$dir/nodes"

# The kernel's settings are the host's: read-only, but for the network's, which are the namespace's own. What a kubelet
# insists on writing is shadowed by plain files.
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount --bind /proc/sys/net proc/sys/net
mkdir -p run/lab/sys
for pair in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    key=${pair%=*}
    file=run/lab/sys/$(echo "$key" | tr / _)
    echo "${pair#*=}" >"$file"
    mount --bind "$file" "proc/sys/$key"
done

if [ "$unified" = yes ]; then
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 sys/fs/cgroup
else
    mount -t tmpfs -o mode=755,nosuid,nodev,noexec tmpfs sys/fs/cgroup
    while read -r controllers name; do
        mkdir "sys/fs/cgroup/$name"
        case $controllers in
        v2) mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "sys/fs/cgroup/$name" ;;
        name=*) mount -t cgroup -o "none,$controllers,nosuid,nodev,noexec" cgroup "sys/fs/cgroup/$name" ;;
        *) mount -t cgroup -o "$controllers,nosuid,nodev,noexec" cgroup "sys/fs/cgroup/$name" ;;
        esac
        for one in $(echo "$controllers" | tr , ' '); do
            [ "$controllers" = "$one" ] || ln -s "$name" "sys/fs/cgroup/$one"
        done
    done <"$dir/hierarchies"
fi

while read -r options source target; do
    if [ -d "$source" ]; then mkdir -p "$root$target"; else mkdir -p "$(dirname "$root$target")" && : >>"$root$target"; fi
    mount --bind "$source" "$root$target"
    mount -o "remount,bind,$options" "$root$target"
done <"$dir/binds"

hostname "$hostname"
ip link set lo up
# Both ends of the cable are in this namespace: an address that is not loopback, and no way out.
ip link add eth0 type veth peer name peer0
ip addr add "$address/24" dev eth0
ip link set eth0 up
ip link set peer0 up
ip route add default dev eth0

cp "$dir/before" run/lab/before
# Only now can somebody enter.
mkdir -p .lab-old
pivot_root . .lab-old
cd /
mv "/.lab-old$dir/leader.part" "/.lab-old$dir/leader"
umount -l /.lab-old
rmdir /.lab-old
/bin/sh -eu /run/lab/before
exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1 \
    /lib/systemd/systemd "systemd.unified_cgroup_hierarchy=$([ "$unified" = yes ] && echo 1 || echo 0)" \
    SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1 systemd.show_status=0
