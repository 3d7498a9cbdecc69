#!/usr/bin/env bash
# Resolves *.in into the locks that launch.sh installs from. Needs uv (in .venv after set-up).
set -euo pipefail
cd "$(dirname "$0")/.."
links=$(python3 -m pip config get global.find-links 2>/dev/null || true)
for kind in cpu gpu; do
  .venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --custom-compile-command requirements/lock.sh ${links:+--find-links "$links"} \
    --overrides "requirements/overrides-$kind.txt" "requirements/$kind.in" -o "requirements/$kind.lock" "$@"
  # Any build of this torch will do (the local label would tie the lock to one index).
  sed -i -E 's/^(torch==[0-9.]+)\+cpu/\1/' "requirements/$kind.lock"
done
