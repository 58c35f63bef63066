#!/usr/bin/env bash
# A GPT that does not fit in one device trains on the King James Bible in the pooled memory of
# four. Sets up what it needs, builds, and shows: the plan for one device, refused; stage 0 on four
# ranks, refused; stage 3 on four ranks within the same budget; planned, measured and formula bytes.
# Exits with 0 only if all of this held.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C

started=$SECONDS
bash examples/setup.sh
mkdir -p build/demo
if ! { cmake --preset cpu && cmake --build --preset cpu --target gpt_train; } >build/demo/build.log 2>&1; then
  tail -n 50 build/demo/build.log >&2
  echo "demo: the build failed (build/demo/build.log)" >&2
  exit 1
fi
echo "-- set-up and build: $((SECONDS - started)) s"
started=$SECONDS

# 3.3 million parameters: 70 MiB a device at stage 0, 40 MiB at stage 3 on 4 ranks.
device_memory=42MiB
model=(--layers 4 --heads 4 --width 256 --sequence 128 --micro-batch 2 --steps 480
  --lr 2e-3 --warmup 20 --device-memory "$device_memory")

say() {
  printf '\n== %s\n' "$*"
}
fail() {
  echo "demo: $*" >&2
  exit 1
}
train() {
  echo "\$ gpt_train ${model[*]} $*"
  build/cpu/bin/gpt_train "${model[@]}" "$@"
}
# Runs what must be refused for want of memory: exit code 2, the table, what would fit.
refused() {
  local code=0
  train "$@" >build/demo/refused.txt 2>build/demo/refused.err || code=$?
  cat build/demo/refused.txt build/demo/refused.err
  echo "exit code $code"
  [ "$code" -eq 2 ] || fail "expected the run to be refused with exit code 2, but it ended with $code"
  [ "$(grep -c . build/demo/refused.err)" -eq 1 ] || fail "expected one line on stderr"
  grep -q 'stage 3 on 4 ranks: .*, fits' build/demo/refused.txt ||
    fail "the refusal does not say what would fit"
}
# number NAME: of the last line of the run, a JSON object
number() {
  tail -n 1 build/demo/run.txt | sed -n "s/.*\"$1\": *\(-\{0,1\}[0-9][-+.0-9e]*\).*/\1/p" | grep . ||
    fail "the last line of the run has no $1"
}
holds() {
  awk "BEGIN { exit !($1) }" || fail "expected $1"
}

say "1. The plan for one device of $device_memory"
refused --ranks 1 --stage 0

say "2. Stage 0 (plain data parallel) on 4 ranks: every rank still holds everything"
refused --ranks 4 --stage 0

say "3. Stage 3 on 4 ranks, the same $device_memory for each"
train --ranks 4 --stage 3 --sample 200 --log build/demo/run.jsonl | tee build/demo/run.txt

say "4. Planned, measured, formula: the table above, and in sum"
planned=$(number planned_peak_bytes) measured=$(number ledger_peak_bytes)
first=$(number first_loss)
first=$(printf '%.4f' "$first")
# A step's loss is that of 1,024 bytes of text, so it is noisy: the mean of the last ten counts.
last=$(tail -n 10 build/demo/run.jsonl | sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p' |
  awk '{ sum += $1 } END { if (NR == 10) printf "%.4f\n", sum / NR }' | grep .) || fail "the log is short"
echo "fullest rank: planned $planned bytes, measured $measured bytes"
echo "process (4 ranks and the program): resident peak $(number resident_peak_bytes) bytes"
echo "loss: $first at first, $last nats per byte over the last ten steps"
holds "$planned == $measured"
holds "$first > 5.3 && $first < 6"
holds "$last < 2.1"
if grep -q 'differs$' build/demo/run.txt; then fail "a category's measured peak differs from the plan"; fi
say "all of it held ($((SECONDS - started)) s)"
