#!/usr/bin/env bash
# The include rules of the layers: what may include which headers of ours, and who may see CUDA,
# NCCL and MPI. usage: layers.sh ROOT
set -euo pipefail
cd "$1"

# Part of the tree, and the quoted includes that it may have (an extended regular expression).
# A part that is not listed is a fault, so that a new layer has to be put into the table.
rules='
include/zero/cuda.h  zero/.*
include/zero         zero/(?!cuda\.h).*
src/core             (core/.*|zero/(dtype|error|model|options|plan|update_rule|update_arguments)\.h)
src/memory           (memory/.*|zero/(backend|dtype|error|fault|ledger|plan)\.h)
src/engine           (engine/.*|core/.*|zero/(?!cpu\.h|cuda\.h|launch\.h|ledger\.h|safetensors\.h|zero\.h).*)
src/cpu              (cpu/.*|kernels/.*|memory/.*|zero/(?!cuda\.h|optimizer\.h|communicator\.h|launch\.h|zero\.h).*)
src/cuda             (cuda/.*|kernels/.*|memory/.*|zero/(?!cpu\.h|optimizer\.h|communicator\.h|launch\.h|zero\.h).*)
src/comm             (comm/.*|zero/(backend|communicator|dtype|error|launch|options|plan)\.h)
src/checkpoint       (checkpoint/.*|core/.*|zero/(backend|checkpoint|dtype|error|model|options|plan|safetensors)\.h)
src/tools            (tools/.*|zero/.*)
kernels              (kernels/.*|zero/(dtype|host_device|isa|make_rule|update_arguments|update_math|update_rule)\.h)
examples             (?!(checkpoint|comm|core|cpu|cuda|engine|kernels|memory|tests)/).*
bench                (kernels/.*|(?!(checkpoint|comm|core|cpu|cuda|engine|kernels|memory|tests)/).*)
'
# Who may include the headers of a device or a transport.
seers='^(include/zero/cuda\.h|src/cuda/|kernels/[^:]*\.cu|src/comm/(nccl|mpi))'

files() {
  find include src kernels examples bench -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort
}
includes() {
  files | xargs -r grep -HnoE '^[[:space:]]*#[[:space:]]*include[[:space:]]*["<][^">]+[">]' || true
}

list=$(includes)
[ "$(wc -l <<<"$list")" -gt 10 ] || { echo "layers.sh found no includes under $1"; exit 1; }
faults=$(RULES=$rules SEERS=$seers perl -ne '
  BEGIN {
    for (split /\n/, $ENV{RULES}) { push @rules, [$1, $2] if /^(\S+)\s+(\S+)$/ }
    $seers = qr/$ENV{SEERS}/;
  }
  next unless m{^([^:]+):(\d+):.*?(["<])([^">]+)[">]};
  my ($file, $line, $quote, $header) = ($1, $2, $3, $4);
  if ($quote eq "<") {
    print "$file:$line: includes <$header>\n"
      if $header =~ m{^(cuda|nccl|mpi|cublas|cub/|thrust/|nvtx)} && $file !~ $seers;
    print "$file:$line: includes <$header>: headers of ours are quoted\n" if $header =~ m{^zero/};
    next;
  }
  my ($rule) = grep { index($file, $_->[0]) == 0 && substr($file, length $_->[0]) =~ m{^(/|$)} } @rules;
  if (!$rule) { print "$file:$line: is in no layer\n" }
  elsif ($header !~ m{^$rule->[1]$}) { print "$file:$line: $rule->[0] may not include \"$header\"\n" }
' <<<"$list")
[ -z "$faults" ] || { echo "$faults"; exit 1; }
