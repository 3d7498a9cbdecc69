#!/usr/bin/env bash
# All families, or those named, then the table: recipes/families/run.sh ["qwen3 tied" llama ...]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -x .venv/bin/python ] || ./launch.sh setup || exit 2
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
if [ $# -eq 0 ]; then
  mapfile -t names < <(.venv/bin/python -c 'import sys; sys.path[:0] = ["recipes/families"]; import family; print(*family.FAMILIES, sep="\n")')
else
  names=("$@")
fi
for name in "${names[@]}"; do .venv/bin/python recipes/families/family.py "$name"; done
.venv/bin/python recipes/families/family.py
