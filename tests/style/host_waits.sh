#!/usr/bin/env bash
# The engine waits on the host only in the calls below; a wait anywhere else would stop the
# overlap of work and communication. usage: host_waits.sh ROOT
set -euo pipefail
cd "$1"

# File, how many waits, and why they are there. values.cpp (export) is free.
allowed='
src/engine/arrays.cpp     1  initialize() resets step counts on the host
src/engine/context.cpp    3  finish() itself; behind done(): rethrows, does not block; the destructor
src/engine/engine.cpp     1  abandon_step() waits for reductions in flight
src/engine/optimizer.cpp  1  PendingStep::get()
src/engine/step.cpp       1  the destructor
'
waits='host_wait[[:space:]]*\(|context(_\.|->|\.)finish[[:space:]]*\(|\.join[[:space:]]*\(|sleep_(for|until)|[Ss]ynchronize|wait\([[:space:]]*kHost|condition_variable|std::future|all_gather\(std::as_bytes'
# Meetings of ranks on the host: construction only.
meetings='
src/engine/engine.cpp     1  the memory of all ranks, at construction
src/engine/same_plan.cpp  1  the plans of all ranks, at construction
'
found=$(grep -rnE "$waits" src/engine --include='*.cpp' --include='*.h' |
  grep -v '^src/engine/values\.cpp:' | grep -vE ':[0-9]+:[[:space:]]*//' || true)
[ -n "$found" ] || { echo "host_waits.sh found not even the waits that are listed"; exit 1; }
bad=0
check() {
  local kind=$1 table=$2 hits=$3 file count have
  while read -r file; do
    count=$(awk -v f="$file" '$1 == f { print $2 }' <<<"$table")
    have=$(grep -c "^$file:" <<<"$hits" || true)
    if [ "$have" -gt "${count:-0}" ]; then
      echo "$file: $have $kind, but ${count:-none} listed in tests/style/host_waits.sh:"
      grep "^$file:" <<<"$hits"
      bad=1
    fi
  done < <(cut -d: -f1 <<<"$hits" | sort -u | grep .)
}
check "host waits" "$allowed" "$(grep -v 'all_gather(std::as_bytes' <<<"$found" || true)"
check "meetings of ranks on the host" "$meetings" \
  "$(grep 'all_gather(std::as_bytes' <<<"$found" || true)"
exit "$bad"
