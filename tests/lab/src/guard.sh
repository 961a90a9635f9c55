# The guard of one machine: unpacks its root, starts it when told, waits for the end of the program that made it, and
# then leaves nothing behind. Standard input is a pipe that only that program holds open, so the pipe's end is the
# program's end, SIGKILL included.
#   guard.sh DIRECTORY TAR     (of the machine: see inside.sh; `groups` lists its control groups)
# shellcheck shell=sh
set -u
dir=$1
tar=$2
exec 3<&0 </dev/null 8>"$dir/lock" >"$dir/console" 2>&1
flock -n 8 || exit 1
trap '' HUP INT TERM QUIT

machine=
word=
if tar --extract --preserve-permissions --numeric-owner --xattrs --xattrs-include='*' --exclude='./dev/*' \
    --file "$tar" --directory "$dir/root" 3<&- 8>&-; then
    : >"$dir/unpacked"
    read -r word <&3
else
    : >"$dir/ended"
fi
if [ "$word" = start ]; then
    (
        while read -r group; do echo 0 >"$group/cgroup.procs"; done <"$dir/groups"
        setsid unshare --fork --kill-child --pid --mount --uts --ipc --net --cgroup --propagation private -- \
            /bin/sh -eu "$dir/inside.sh" "$dir"
        echo "process 1 ended: $?"
        : >"$dir/ended"
    ) 3<&- 8>&- &
    machine=$!
fi
# "keep" hands the machine over to the user: it then stays until its systemd ends.
word=
read -r word <&3
if [ "$word" = keep ] && [ -n "$machine" ]; then
    wait "$machine"
fi

if [ -n "$machine" ]; then
    # Whatever is in the control groups: the shell above, `unshare`, the leader and all that it started.
    for _ in 1 2 3 4 5 6 7 8; do
        while read -r group; do
            find "$group" -name cgroup.procs -exec cat {} + 2>/dev/null
        done <"$dir/groups" | sort -u | xargs -r kill -9 2>/dev/null
        sleep 0.05 # waits: for the kernel to end them
        kill -0 "$machine" 2>/dev/null || break
    done
    wait "$machine" 2>/dev/null
fi
while read -r group; do
    tries=0
    until [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null; do
        tries=$((tries + 1))
        [ $tries -lt 200 ] || break
        sleep 0.05 # waits: for ended processes to leave their group
    done
done <"$dir/groups"
for _ in 1 2 3 4 5; do
    rm -rf --one-file-system "$dir" && break
    sleep 0.2 # waits: for a process that still writes there to end
done
