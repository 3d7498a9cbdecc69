#!/usr/bin/env bash
# Resolves *.in into the locks that launch.sh installs from, and asks whether each can be installed. Needs uv (in .venv
# after set-up). torch's builds for CPU and GPU ask for different packages, so each lock is resolved from its own build.
set -euo pipefail
cd "$(dirname "$0")/.."
links=$(python3 -m pip config get global.find-links 2>/dev/null || true)
for kind in cpu gpu; do
  lock="requirements/$kind.lock"
  options=(--overrides "requirements/overrides-$kind.txt" --python-version 3.11 --python-platform x86_64-manylinux_2_28)
  if [ "$kind" = cpu ]; then
    # The lock's torch has no label, so that any build of it will do; a release with a label is another one to uv.
    [ ! -f "$lock" ] || sed -i -E 's/^(torch==[0-9.]+)$/\1+cpu/' "$lock"
    if [ -n "$links" ]; then options+=(--find-links "$links"); else options+=(--torch-backend cpu); fi
  fi
  .venv/bin/uv pip compile --quiet --custom-compile-command requirements/lock.sh "${options[@]}" \
    "requirements/$kind.in" -o "$lock" "$@"
  sed -i -E 's/^(torch==[0-9.]+)\+cpu/\1/' "$lock"
  .venv/bin/uv pip install --quiet --dry-run --reinstall --python .venv/bin/python "${options[@]}" -r "$lock"
done
