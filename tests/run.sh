#!/usr/bin/env bash
# Sets up, builds and runs the tests:
# tests/run.sh [--preset cpu|asan|tsan] [--folders "core comm ..."] [--all] [--record]
#   --folders only the tests in these folders of tests/; not compared with what is recorded
#   --all     also those with the label "all" (mutations: each a build of its own)
#   --record  writes the numbers of tests that ran to tests/count and tests/count_instances
# Fails if a test fails or, with the preset cpu, if fewer ran than are recorded. The last lines
# are ctest's own summary.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=cpu folders= all= record=
while [ $# -gt 0 ]; do
  case $1 in
    --preset) preset=${2:?--preset needs a name}; shift ;;
    --folders) folders=${2:?--folders needs names}; shift ;;
    --all) all=1 ;;
    --record) record=1 ;;
    *) sed -n '2,8s/^# //p' "$0" >&2; exit 2 ;;
  esac
  shift
done
if [ -n "$record" ] && { [ "$preset" != cpu ] || [ -n "$all$folders" ]; }; then
  echo "tests/run.sh: --record is for the preset cpu, without --all and --folders" >&2
  exit 2
fi

started=$SECONDS
bash examples/setup.sh
build=build/$preset
mkdir -p "$build"
log=$build/tests.log
quietly() {
  if ! "$@" >"$log" 2>&1; then
    tail -n 100 "$log" >&2
    echo "tests/run.sh: failed: $*  (all of it: $log)" >&2
    exit 1
  fi
}
export CCACHE_NOHASHDIR=1  # the same sources are compiled again by the consumer test
quietly cmake --preset "$preset"
sed -n '/^-- zero /,/install rules/p' "$log"
echo "-- builds $build"
targets=()
for folder in $folders; do
  targets+=(--target "tests_$folder")
done
quietly cmake --build --preset "$preset" "${targets[@]}"
echo "-- set-up and build: $((SECONDS - started)) s"

# Prints ctest's report as it comes, but keeps the summary for the end.
hold_summary() {
  awk '/^[0-9]+% tests passed/ { held = 1 } !held { print; fflush() }'
}
failed=0
run=(ctest --test-dir "$build" -j2 --output-on-failure --no-tests=error --output-junit tests.xml)
if [ -n "$all" ]; then
  export ZERO_TEST_ALL=1 # whole grids
else
  run+=(-LE '^all$')
fi
if [ -n "$folders" ]; then
  run+=(-L "^(${folders// /|})\$")
fi
rm -f "$build/tests.xml"
case $preset in
  asan) export ZERO_TEST_TIME_SCALE=${ZERO_TEST_TIME_SCALE:-4} ;;
  tsan) export ZERO_TEST_TIME_SCALE=${ZERO_TEST_TIME_SCALE:-10} ;;
esac
"${run[@]}" 2>&1 | tee "$log" | hold_summary || failed=1

# One line a test: its name and what became of it.
sed -n 's/^[[:space:]]*<testcase name="\([^"]*\)".* status="\([a-z]*\)".*/\2 \1/p' \
  "$build/tests.xml" >"$build/tests.txt"
awk '$1 == "notrun" || $1 == "disabled" { $1 = ""; print "skipped:" $0; n++ }
     END { print n + 0 " tests skipped" }' "$build/tests.txt"
# "All/Suite.Name/3" and "Suite.Name<3>" are instances of one test case.
# The check of the format is not counted: it needs clang-format 14, which a bare machine lacks.
ran() {
  awk '($1 == "run" || $1 == "fail") && $2 != "Style.SourcesAreFormatted" { print $2 }' \
    "$build/tests.txt"
}
instances=$(ran | wc -l)
cases=$(ran | sed -E 's:&lt;.*::; s:^[^./]+/([^./]+\.):\1:; s:^([^/]+\.[^/]+)/.*:\1:' | sort -u | wc -l)
echo "$cases test cases ran, $instances with the instances of parameterised ones"

# compare FILE FOUND
compare() {
  local recorded
  recorded=$(cat "$1" 2>/dev/null) || recorded=none
  if ! [ "$2" -ge "$recorded" ] 2>/dev/null; then
    echo "tests/run.sh: $2 ran, but $1 records $recorded: a test is gone (if on purpose: --record)" >&2
    failed=1
  fi
}
if [ -n "$record" ] && [ "$failed" -eq 0 ]; then
  echo "$cases" >tests/count
  echo "$instances" >tests/count_instances
elif [ "$preset" = cpu ] && [ -z "$folders" ]; then
  compare tests/count "$cases"
  compare tests/count_instances "$instances"
fi
sed -n '/^[0-9]*% tests passed/,$p' "$log"
exit "$failed"
