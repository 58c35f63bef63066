#!/usr/bin/env bash
# Installs what the build, the tests and the demo need on Debian 12, where it is missing: as root,
# or with sudo. Nothing else is downloaded at any time.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache               # the build
  libxxhash-dev nlohmann-json3-dev           # the library
  libgtest-dev libgmock-dev libzstd-dev      # the tests
  libboost-program-options-dev libopenblas-pthread-dev bible-kjv  # the examples, the demo's text
)

fail() {
  echo "setup: $*" >&2
  exit 1
}

# Prints the packages that are not installed.
missing() {
  local package
  for package in "${packages[@]}"; do
    if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
      echo "$package"
    fi
  done
}

command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
  fail "this is no Debian: install what these Debian packages hold, then use cmake --workflow --preset cpu: ${packages[*]}"
mapfile -t wanted < <(missing)
[ "${#wanted[@]}" -eq 0 ] && exit 0

root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || fail "neither root nor sudo: as root, run apt-get install ${wanted[*]}"
  root=(sudo)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@" </dev/null >"$log" 2>&1
}
install() {
  apt install --no-install-recommends "${wanted[@]}"
}

echo "setup: installs ${wanted[*]}"
# A fresh system has no package lists; an old one may have lists of files that are gone.
if ! install; then
  apt update || { tail -n 20 "$log" >&2; fail "apt-get update failed"; }
  install || { tail -n 20 "$log" >&2; fail "apt-get install ${wanted[*]} failed"; }
fi
mapfile -t wanted < <(missing)
[ "${#wanted[@]}" -eq 0 ] || fail "still missing after apt-get install: ${wanted[*]}"
echo "setup: done"
