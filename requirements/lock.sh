#!/usr/bin/env bash
# Resolves *.in into the locks that launch.sh installs from, and asks whether each can be met on both Pythons. Needs uv
# (in .venv after set-up). torch's builds for CPU and GPU ask for different packages: each lock comes from its own build.
set -euo pipefail
cd "$(dirname "$0")/.."
links=$(python3 -m pip config get global.find-links 2>/dev/null || true)
for kind in cpu gpu; do
  lock="requirements/$kind.lock"
  options=(--overrides "requirements/overrides-$kind.txt" --python-platform x86_64-manylinux_2_28)
  if [ "$kind" = cpu ]; then
    # The lock's torch has no label, so that any build of it will do; a release with a label is another one to uv.
    [ ! -f "$lock" ] || sed -i -E 's/^(torch==[0-9.]+)$/\1+cpu/' "$lock"
    if [ -n "$links" ]; then options+=(--find-links "$links"); else options+=(--torch-backend cpu); fi
  fi
  .venv/bin/uv pip compile --quiet --python-version 3.11 --custom-compile-command requirements/lock.sh "${options[@]}" \
    "requirements/$kind.in" -o "$lock" "$@"
  sed -i -E 's/^(torch==[0-9.]+)\+cpu/\1/' "$lock"
  for python in 3.11 3.12; do
    .venv/bin/uv pip compile --quiet --no-header --python-version "$python" "${options[@]}" "$lock" >/dev/null
  done
done
