#!/usr/bin/env bash
# No file of ours has more than 600 lines. usage: length.sh ROOT
set -euo pipefail
cd "$1"
{ find include src kernels examples bench tests cmake -type f \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.sh' -o -name '*.py' \
  -o -name '*.cmake' -o -name 'CMakeLists.txt' \) -exec wc -l {} + 2>/dev/null || true; } |
  awk '$2 != "total" { files++ }
       $2 != "total" && $1 > 600 { print $2 ": " $1 " lines, more than 600"; bad = 1 }
       END { if (!files) print "length.sh found no files"; exit bad || !files }'
