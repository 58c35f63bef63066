#!/usr/bin/env bash
# Weak scaling: two ranks of one thread against two independent one-rank runs at the same time.
# usage: bench/scaling.sh [ROUNDS [STAGE]]   (5 rounds, stage 3)
# Exits with 1 when the median of tokens per second is below 0.9 of the sum of the two.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
rounds=${1:-5} stage=${2:-3}
build gpt_train
data=$(text)
out=build/bench/scaling
mkdir -p "$out"

# train NAME RANKS: the defaults of bench/peers/gpt_torch.py, per rank
train() {
  build/cpu/bin/gpt_train --data "$data" --layers 6 --heads 6 --width 384 --sequence 256 --micro-batch 4 \
    --steps 14 --threads 1 --seed 1 --ranks "$2" --stage "$stage" >"$out/$1.txt"
}
speed() {
  field tokens_per_second <"$out/$1.txt"
}
: >"$out/together" && : >"$out/apart"
for ((round = 1; round <= rounds; ++round)); do
  train first 1 &
  first=$!
  train second 1
  wait "$first"
  apart=$(awk -v a="$(speed first)" -v b="$(speed second)" 'BEGIN { print a + b }')
  train together 2
  together=$(speed together)
  echo "$apart" >>"$out/apart"
  echo "$together" >>"$out/together"
  printf 'round %d: 2 ranks %.0f tokens/s, two 1-rank runs %.0f: %s\n' "$round" "$together" "$apart" "$(ratio "$together" "$apart")"
done
a=$(median <"$out/together") b=$(median <"$out/apart")
printf 'medians: 2 ranks at stage %d %.0f tokens/s, sum of two 1-rank runs %.0f: ratio %s (at least 0.9)\n' \
  "$stage" "$a" "$b" "$(ratio "$a" "$b")"
at_least "$a" "$(awk -v b="$b" 'BEGIN { print 0.9 * b }')"
