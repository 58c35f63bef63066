#!/usr/bin/env bash
# clang-format 14 has nothing to change. Skipped without it (Debian: clang-format-14).
# usage: format.sh ROOT
set -euo pipefail
cd "$1"
tool=$(command -v clang-format-14 || command -v clang-format || true)
if [ -z "$tool" ] || ! "$tool" --version | grep -q 'version 14\.'; then
  echo "skipped: no clang-format 14"
  exit 77
fi
mapfile -t files < <(find include src kernels examples bench tests -type f \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort)
[ "${#files[@]}" -gt 0 ] || { echo "no sources under $1"; exit 1; }
printf '%s\n' "${files[@]}" | xargs -P 2 -n 20 "$tool" --dry-run --Werror --ferror-limit=3
