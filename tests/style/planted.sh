#!/usr/bin/env bash
# Each check of this folder passes on a small clean tree and fails when a fault is planted in it.
# usage: planted.sh ROOT COMPILER
set -euo pipefail
here=$1/tests/style
compiler=${2:-c++}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

bad=0
clean() {
  rm -rf "$tree"
  mkdir -p "$tree"/{include/zero,src/engine,src/cpu,src/core,kernels,tests,examples}
  printf '// A header.\n#pragma once\n\nint f();\n' >"$tree/include/zero/dtype.h"
  printf '// A program.\nint main() {\n  return 0;\n}\n' >"$tree/examples/main.cpp"
  printf 'TEST(A, IsTrue) {}\nTEST(A, IsFalse) {}\n' >"$tree/tests/a_test.cpp"
  cp "$1/.clang-format" "$tree/"
  local i
  for i in 1 2 3 4 5 6; do
    printf '#include "zero/dtype.h"\n\n#include "core/a.h"\n' >"$tree/src/core/a$i.cpp"
  done
  printf 'void g() {\n  device.host_wait(event);\n}\n' >"$tree/src/engine/optimizer.cpp"
}
# expect pass|fail SCRIPT WHAT
expect() {
  local result=pass code=0
  bash "$here/$2" "$tree" "$compiler" >"$tree/log" 2>&1 || code=$?
  [ "$code" -eq 77 ] && return
  [ "$code" -eq 0 ] || result=fail
  if [ "$result" != "$1" ]; then
    echo "$2 on $3: expected $1, but $result"
    cat "$tree/log"
    bad=1
  fi
}
# plant SCRIPT FILE TEXT: appends a line
plant() {
  clean "$root"
  mkdir -p "$(dirname "$tree/$2")"
  printf '%s\n' "$3" >>"$tree/$2"
  expect fail "$1" "$2: $3"
}
root=$1
clean "$root"
for script in layers length host_waits default_stream headers marks format unique; do
  expect pass "$script.sh" "a clean tree"
done
plant layers.sh src/engine/a.cpp '#include "cpu/cpu_stream.h"'
plant layers.sh src/engine/a.cpp '#include "zero/cpu.h"'
plant layers.sh src/cpu/a.cpp '#include "cuda/cuda_handle.h"'
plant layers.sh src/cpu/a.cpp '#include "engine/engine.h"'
plant layers.sh include/zero/dtype.h '#include <cuda_runtime.h>'
plant layers.sh src/engine/a.cpp '#include <mpi.h>'
plant layers.sh kernels/a.h '#include "zero/plan.h"'
plant layers.sh examples/main.cpp '#include "engine/engine.h"'
plant layers.sh src/surprise/a.cpp '#include "zero/dtype.h"'
plant length.sh src/core/long.cpp "$(yes '//' | head -n 601)"
plant host_waits.sh src/engine/step.cpp '  device.host_wait(a); device.host_wait(b);
  context_.finish();'
plant host_waits.sh src/engine/gather.cpp '  context_.finish();'
plant host_waits.sh src/engine/optimizer.cpp 'void h() { device.host_wait(event); }'
plant default_stream.sh kernels/a.cu 'cudaDeviceSynchronize();'
plant default_stream.sh kernels/a.cu 'update<<<blocks, threads>>>(x);'
plant default_stream.sh include/zero/dtype.h 'void f(int, StreamRef stream = kHost);'
plant headers.sh include/zero/dtype.h 'std::string missing_include();'
plant marks.sh src/core/a.cpp '// TODO later'
plant marks.sh tests/a_test.cpp 'open("/work/shared/x");'
plant format.sh src/core/a1.cpp 'int   x ;'
plant unique.sh tests/b_test.cpp 'TEST(A, IsTrue) {}'
plant unique.sh tests/deeper/a_test.cpp 'TEST(B, IsTrue) {}'
exit "$bad"
