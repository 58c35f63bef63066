#!/usr/bin/env bash
# Plants each mutation in a copy of the tree and expects the test that it names to turn red.
# usage: run.sh [--scratch FOLDER] [NAME...]     (README.md says what a mutation is)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$root/build/mutations
if [ "${1:-}" = --scratch ]; then
  scratch=${2:?--scratch needs a folder}
  shift 2
fi
limit=120 # seconds for one test; a mutation that hangs is red

fail() {
  echo "mutations: $*" >&2
  exit 1
}
# field FILE KEY
field() {
  sed -n "s/^$2: //p" "$1"
}
# line FILE SIGN: the text behind "- " or "+ "
line() {
  sed -n "s/^[$2] \{0,1\}//p" "$1"
}

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
  for file in "$root"/tests/mutations/*.mutation; do
    names+=("$(basename "$file" .mutation)")
  done
fi

# Copies keep their times, so that little is built again; what an earlier run mutated must be.
mkdir -p "$scratch/tree"
touch "$scratch/mutated"
for part in CMakeLists.txt cmake include src kernels tests; do
  rm -rf "$scratch/tree/$part"
  cp -a "$root/$part" "$scratch/tree/"
done
(cd "$scratch/tree" && sort -u "$scratch/mutated" | xargs -r touch -c)
tree=$scratch/tree
build=$scratch/build
log=$scratch/log.txt
export CCACHE_BASEDIR=$scratch
cmake -G Ninja -S "$tree" -B "$build" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 \
  -DZERO_BUILD_EXAMPLES=OFF -DZERO_BUILD_BENCH=OFF >"$log" 2>&1 || { cat "$log"; fail "no configuration"; }

tests=()
for name in "${names[@]}"; do
  file=$root/tests/mutations/$name.mutation
  [ -f "$file" ] || fail "no $file"
  tests+=("$(field "$file" red)")
done
mapfile -t programs < <(printf '%s\n' "${tests[@]}" | cut -d' ' -f1 | sort -u)
ninja -C "$build" "${programs[@]}" >"$log" 2>&1 || { tail -50 "$log"; fail "the tree does not build"; }
: >"$scratch/mutated"

# run_test "PROGRAM FILTER"; what the shell says of a crash is of no interest
run_test() {
  {
    timeout "$limit" "$build/bin/${1%% *}" "--gtest_filter=${1#* }" --gtest_brief=1 >"$log" 2>&1
  } 2>/dev/null
}
while read -r test; do
  run_test "$test" || { tail -50 "$log"; fail "red without any mutation: $test"; }
  grep -q '^\[  PASSED  \] [1-9]' "$log" || fail "finds no test: $test"
done < <(printf '%s\n' "${tests[@]}" | sort -u)

survivors=0
printf '%-32s %-24s %-7s %s\n' mutation kind result test
for i in "${!names[@]}"; do
  file=$root/tests/mutations/${names[i]}.mutation
  target=$tree/$(field "$file" file)
  before=$(cat "$target" && echo x)
  old=$(line "$file" -)
  new=$(line "$file" +)
  rest=${before#*"$old"}
  [ -n "$old" ] && [ "$rest" != "$before" ] || fail "${names[i]} does not apply: no such text in $target"
  [ "${rest#*"$old"}" = "$rest" ] || fail "${names[i]} does not apply: its text occurs twice"
  field "$file" file >>"$scratch/mutated"
  printf '%s' "${before%%"$old"*}$new${rest%x}" >"$target"
  result=red
  if ! ninja -C "$build" "${tests[i]%% *}" >"$log" 2>&1; then
    grep -m3 'error:' "$log" >&2 || true
    result=broken
  elif run_test "${tests[i]}"; then
    result=GREEN
  fi
  [ "$result" = red ] || survivors=$((survivors + 1))
  printf '%-32s %-24s %-7s %s\n' "${names[i]}" "$(field "$file" kind)" "$result" "${tests[i]}"
  printf '%s' "${before%x}" >"$target"
done
echo "${#names[@]} mutations, $survivors not red"
[ "$survivors" -eq 0 ]
