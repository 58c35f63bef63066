#!/usr/bin/env bash
# Test programs are named by their file, test cases by suite and name: none may hide another.
# usage: unique.sh ROOT
set -euo pipefail
cd "$1"
stems=$(find tests -name '*_test.cpp' -exec basename {} \; | sort | uniq -d)
[ -z "$stems" ] || { echo "two test files of one name: $stems"; exit 1; }
names=$(find tests -name '*.cpp' -exec cat {} + | tr '\n' ' ' |
  grep -oE '\bTEST(_F|_P)?\([[:space:]]*[A-Za-z0-9_]+,[[:space:]]*[A-Za-z0-9_]+[[:space:]]*\)' |
  sed -E 's/^TEST(_F|_P)?\([[:space:]]*//; s/,[[:space:]]*/./; s/[[:space:]]*\)//' | sort | uniq -d)
[ -z "$names" ] || { echo "two test cases of one name: $names"; exit 1; }
