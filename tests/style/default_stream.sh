#!/usr/bin/env bash
# No default stream and no wait for a whole device: order between streams is in events.
# usage: default_stream.sh ROOT
set -euo pipefail
cd "$1"
dirs=()
for dir in include src kernels examples; do [ -d "$dir" ] && dirs+=("$dir"); done
if grep -rnE 'cudaDeviceSynchronize|cudaStream(Legacy|PerThread)|cudaStreamDefault|cudaMemcpy\(|cudaMemset\(|cudaMalloc\(|<<<[^,>]*,[^,>]*(,[^,>]*)?>>>|per-thread' "${dirs[@]}" \
  --include='*.h' --include='*.cpp' --include='*.cu' --include='*.cuh'; then
  exit 1
fi
# A stream argument with a default value is a default stream by another name.
if grep -rnE 'StreamRef[[:space:]]+[a-z_]*[[:space:]]*=[[:space:]]*(kHost|\{\})[[:space:]]*[,)]' include src; then
  exit 1
fi
