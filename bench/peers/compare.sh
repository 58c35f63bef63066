#!/usr/bin/env bash
# gpt_train against the same training in PyTorch, alternated in one run: stage 0 with DDP, stage 3
# with FSDP2; 2 ranks of one thread, fp32, 6 layers, width 384, T 256, micro-batch 4.
# usage: bench/peers/compare.sh [ROUNDS [DIR]]   (3 rounds; DIR: setup.sh's Python environment)
# Exits with 1 when a median is not what bench/README.md asks.
set -euo pipefail
source "$(dirname "$0")/../lib.sh"
rounds=${1:-3} environment=${2:-build/bench/peers}
build gpt_train
data=$(text)
out=build/bench/compare
mkdir -p "$out"
bash bench/peers/setup.sh "$environment"
rm -f "$out"/*

# Resident peak of the program when it does nothing, in bytes.
empty=$("$environment/bin/python" - build/cpu/bin/gpt_train <<'PY'
import resource, subprocess, sys
subprocess.run([sys.argv[1], "--help"], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
PY
)

ours() {
  build/cpu/bin/gpt_train --data "$data" --layers 6 --heads 6 --width 384 --sequence 256 --micro-batch 4 \
    --steps 20 --threads 1 --ranks 2 --lr 1e-3 --warmup 10 --clip 1 --stage "$1" >"$out/run.txt"
  printf '%.1f\n' "$(field tokens_per_second <"$out/run.txt")" >>"$out/stage$1.speed"
  awk -v peak="$(field resident_peak_bytes <"$out/run.txt")" -v empty="$empty" \
    'BEGIN { printf "%.0f\n", (peak - empty) / 2 }' >>"$out/stage$1.peak"
}
theirs() {
  "$environment/bin/python" bench/peers/gpt_torch.py --mode "$1" --data "$data" --ranks 2 --threads 1 \
    >"$out/run.txt" 2>"$out/run.err" || { tail -n 20 "$out/run.err" >&2; exit 1; }
  field tokens_per_second <"$out/run.txt" >>"$out/$1.speed"
  field peak_bytes_per_rank <"$out/run.txt" >>"$out/$1.peak"
}
last() {
  tail -n 1 "$out/$1"
}
for ((round = 1; round <= rounds; ++round)); do
  ours 0
  theirs ddp
  ours 3
  theirs fsdp2
  echo "round $round, tokens/s: stage 0 $(last stage0.speed), ddp $(last ddp.speed);" \
    "stage 3 $(last stage3.speed), fsdp2 $(last fsdp2.speed)"
done

status=0
# report WHAT OURS THEIRS BAR least|most
report() {
  local a b r good=missed
  a=$(median <"$out/$2") b=$(median <"$out/$3")
  r=$(ratio "$a" "$b")
  if [ "$5" = least ]; then at_least "$r" "$4" && good=held; else at_least "$4" "$r" && good=held; fi
  [ "$good" = held ] || status=1
  printf '%-44s %12.0f %12.0f   ratio %s (at %s %s: %s)\n' "$1" "$a" "$b" "$r" "$5" "$4" "$good"
}
printf '%-44s %12s %12s\n' "medians of $rounds rounds" ours theirs
report "tokens/s, stage 0 / ddp" stage0.speed ddp.speed 1.0 least
report "tokens/s, stage 3 / fsdp2" stage3.speed fsdp2.speed 1.2 least
report "resident peak a rank, stage 3 / fsdp2" stage3.peak fsdp2.peak 0.6 most
echo "(resident peak: above an empty program's, divided by ranks; ours when empty: $empty bytes)"
exit "$status"
