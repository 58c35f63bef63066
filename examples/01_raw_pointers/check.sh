#!/usr/bin/env bash
# The two programs differ by less than 25 lines, and their loss curves agree.
# usage: check.sh SOURCES PROGRAMS
set -euo pipefail
changed=$(diff "$1/before.cpp" "$1/after.cpp" | grep -c '^[<>]' || true)
echo "$changed lines differ"
[ "$changed" -gt 0 ] && [ "$changed" -lt 25 ]

# The mean over the ranks' parts of a batch is the loss of the batch.
curve() {
  "$1" | awk '$1 == "step" { sum[$2] += $6; parts[$2]++ }
              END { for (step in sum) printf "%d %.7f\n", step, sum[step] / parts[step] }' | sort -n
}
join <(curve "$2/raw_pointers_before" | sort) <(curve "$2/raw_pointers_after" | sort) | sort -n | awk '
  { difference = $2 > $3 ? $2 - $3 : $3 - $2
    if (difference > 2e-6 + 1e-4 * $2) { print "step " $1 ": before " $2 ", after " $3; bad = 1 }
    if (NR == 1) first = $3
    last = $3 }
  END { print NR " steps, loss " first " to " last
        exit bad || NR != 200 || last > first / 10 }'
