#!/usr/bin/env bash
# Tries provision.py where it could go wrong: killed at any moment, corrupt files, no package index, an unwritable folder,
# two runs at once. Whatever happens, a file under its final name must be the pinned one, and the next run must repair.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
folder=$scratch/runtime
log=$scratch/log
lib=$folder/libonnxruntime.so
plugin=$folder/libonnxruntime_providers_webgpu.so

provision() { python3 "$here/provision.py" "$folder" runtime 2>"$log"; }
die() { printf 'check-setup: FAILED: %s\n' "$*" >&2; cat "$log" >&2; exit 1; }
ok() { printf 'check-setup: ok: %s\n' "$*"; }
says() { grep -q -- "$1" "$log" || die "no word of '$1' in the message"; }
pinned() { # file
    [[ $(sha256sum <"$1" | cut -d' ' -f1) == $(awk -v f="${1##*/}" '$2 == f { print $3 }' "$here/pins.txt") ]]
}
both_pinned() { pinned "$lib" && pinned "$plugin"; }
only_lock_left() { [[ -z $(find "$folder" -mindepth 1 -name '.provision-*' ! -name .provision-lock) ]]; }

# Fails, says so, and leaves nothing under a final name.
PIP_NO_INDEX=1 provision && die 'succeeded without a package index'
says 'pip could not download'
[[ ! -e $lib && ! -e $plugin ]] && only_lock_left || die 'leftovers after a failed download'
ok 'no package index: refused, nothing left'

# Killed at a moment that moves through the whole run. The group is killed, so that pip does not go on.
start=$(date +%s%N); provision; took=$(( ($(date +%s%N) - start) / 1000000 ))
both_pinned && only_lock_left || die 'a fresh run'
ok "fresh run, $took ms"
cut=0
for step in $(seq 1 8); do
    rm -f "$lib" "$plugin"
    setsid python3 "$here/provision.py" "$folder" runtime 2>"$log" &
    victim=$!
    sleep "$(awk -v t="$took" -v s="$step" 'BEGIN { print t * s / 8000 }')"
    kill -KILL -- "-$victim" 2>/dev/null && cut=$((cut + 1))
    wait "$victim" 2>/dev/null || true
    for file in "$lib" "$plugin"; do
        [[ ! -e $file ]] || pinned "$file" || die "a half-written ${file##*/} after a kill at step $step"
    done
done
(( cut >= 4 )) || die "only $cut of 8 runs were killed in time to prove anything"
provision
both_pinned && only_lock_left || die 'the run after the kills'
ok "killed $cut times, never a half-written library; the next run repaired it and removed the leftovers"

# A flipped byte (same size and times), a short file, an empty file.
cp -p "$lib" "$scratch/keep"
printf 'X' | dd of="$lib" bs=1 seek=1000000 conv=notrunc status=none
touch -r "$scratch/keep" "$lib"
provision && says 'is not the pinned one' && pinned "$lib" || die 'a flipped byte'
truncate -s 1000 "$plugin"
provision && pinned "$plugin" || die 'a short file'
: >"$lib"
provision && pinned "$lib" || die 'an empty file'
ok 'corrupt, short and empty libraries: replaced'

# Good files need neither an index nor write permission, and no time to speak of.
PIP_NO_INDEX=1 provision && [[ ! -s $log ]] || die 'good files were touched'
ok 'a second run is silent and needs no index'

# Root writes anywhere, unless it lays that right down.
bound=()
(( EUID != 0 )) || bound=(setpriv --bounding-set=-dac_override)
chmod 555 "$folder"
if "${bound[@]}" touch "$folder/probe" 2>/dev/null; then
    die 'could not make a folder read-only'
fi
"${bound[@]}" python3 "$here/provision.py" "$folder" runtime 2>"$log" || die 'good files in a read-only folder'
chmod 755 "$folder"; rm -f "$lib"; chmod 555 "$folder"
"${bound[@]}" python3 "$here/provision.py" "$folder" runtime 2>"$log" && die 'wrote to a read-only folder'
says 'cannot write to'
chmod 755 "$folder"
ok 'read-only folder: good files pass, a missing one is a clear error'

# Two at once: both succeed, one of them waits.
rm -f "$lib" "$plugin"
python3 "$here/provision.py" "$folder" runtime 2>"$scratch/log2" & other=$!
provision; wait "$other"
both_pinned && only_lock_left || die 'two runs at once'
ok 'two runs at once'
