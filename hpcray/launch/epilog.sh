#!/bin/sh
# For srun --task-epilog: slurmstepd runs it as the user on every node when a rank has ended, also where Slurm has killed
# all processes of the step at once. Removes session directories of dead nodes (platform/session_directory.py), as the user's next start
# would. Those of nodes that live are locked. It may take a few seconds, no more: Slurm kills it then.
command -v flock >/dev/null || exit 0

if [ "$1" = sweep ]; then # the lock of $2 is held: nobody makes a session directory meanwhile
    for try in 1 2 3 4 5 6 7 8 9 10; do
        dying=
        for session in "$2"/[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]; do
            [ -f "$session/lock" ] && [ ! -L "$session" ] || continue
            flock --nonblock "$session/lock" rm -rf "$session" && continue
            raylet=$(sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$session/info.json" 2>/dev/null)
            [ -n "$raylet" ] && [ ! -d "/proc/$raylet" ] && dying=yes
        done
        [ -n "$dying" ] || break
        sleep 0.2
    done
    rmdir "$2" 2>/dev/null
    exit 0
fi

for tmp in "$HPCRAY_TMPDIR" "$SLURM_TMPDIR" "$TMPDIR" /tmp; do
    root="$tmp/hpcray-$(id -u)"
    [ -n "$tmp" ] && [ -d "$root" ] && [ ! -L "$root" ] && [ -O "$root" ] || continue
    [ -O "$tmp" ] || [ "$(stat -Lc %u "$tmp")" = 0 ] || continue # its owner could exchange the root between two looks
    flock --timeout 2 "$root" "$0" sweep "$root"
done
exit 0
