# What the benchmark scripts share; to be sourced. Runs from the root of the tree.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export LC_ALL=C

# Builds the programs named, quietly.
build() {
  bash examples/setup.sh
  mkdir -p build/bench
  if ! { cmake --preset cpu && cmake --build --preset cpu --target "$@"; } >build/bench/build.log 2>&1; then
    tail -n 50 build/bench/build.log >&2
    exit 1
  fi
}

# The King James Bible as one file; prints its name.
text() {
  local file=build/bench/bible.txt
  [ -s "$file" ] || { bible -f 'gen1:1-rev22:21' >"$file.part" && mv "$file.part" "$file"; }
  echo "$file"
}

# field NAME < text: the number of that name in the last line, a JSON object.
field() {
  tail -n 1 | sed -n "s/.*\"$1\": *\(-\{0,1\}[0-9][-+.0-9e]*\).*/\1/p" | grep .
}

median() {
  sort -g | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}

# ratio A B: A/B; at_least A B: whether A >= B
ratio() {
  awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f\n", a / b }'
}
at_least() {
  awk -v a="$1" -v b="$2" 'BEGIN { exit !(a >= b) }'
}
