#!/usr/bin/env bash
# Every public header compiles alone, with our warnings, and starts with a comment and
# #pragma once. usage: headers.sh ROOT COMPILER
set -euo pipefail
cd "$1"
compiler=${2:-c++}
mapfile -t headers < <(find include/zero -name '*.h' ! -name cuda.h | sort)
[ "${#headers[@]}" -gt 0 ] || { echo "no public headers under $1/include/zero"; exit 1; }
export compiler
one() {
  head -n 1 "$1" | grep -q '^// [A-Z]' || { echo "$1: does not start with a sentence"; return 1; }
  grep -qx '#pragma once' "$1" || { echo "$1: no #pragma once"; return 1; }
  echo "#include \"${1#include/}\"" |
    "$compiler" -x c++ -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Wconversion \
      -Wsign-conversion -Wshadow -Werror -Iinclude - || { echo "$1: does not compile alone"; return 1; }
}
export -f one
printf '%s\0' "${headers[@]}" | xargs -0 -P 2 -I{} bash -c 'one "$1"' _ {}
