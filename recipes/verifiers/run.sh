#!/usr/bin/env bash
# Odd answers to all tasks, or to those named: recipes/verifiers/run.sh [countdown coin_flip ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -x .venv/bin/python ] || ./launch.sh setup
PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" exec .venv/bin/python recipes/verifiers/odd_answers.py "$@"
