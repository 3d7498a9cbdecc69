#!/usr/bin/env bash
# bebop's one entry: sets up .venv on first use, then runs a command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
readonly UV_VERSION=0.13.9

usage() {
  cat <<'TEXT'
usage: ./launch.sh COMMAND [hydra overrides ...]

  demo            all stages on this machine: a tiny policy, its MTP heads, async GRPO, the report
  sft             train the MTP heads of a policy, before RL
  grpo            GRPO whose rollouts speculate with those heads
  eval            acceptance of trained heads: observed in the engine, and scored exactly
  bench SUITE     measure: rollout (the planner), tree or kernels
  report DIR      one HTML page from the records of the run in DIR
  monitor watch DIR     show a run's steps, slope and decision as they come
  monitor replay DIR    the decision after each step of a run
  monitor import FILE   bring another trainer's records into a run folder: CSV, verl console, wandb, vLLM /metrics
  doctor          list what is installed, and test whether the engine is lossless
  test [quick]    the test suite; quick: without the end-to-end tests; more words go to pytest
  setup           only make .venv from the pinned versions
  help            this text

Commands from demo to doctor take hydra overrides (sft.steps=200 loss=hard_ce), recipe=<folder of recipes/>,
-m for a sweep (-m loss=hard_ce,e2e_tv), --cfg job to print the config, and --dry-run to check it without running.
Environment:
  BEBOP_ACCELERATOR=cpu|gpu   which pinned versions to install; default: gpu if nvidia-smi lists one
  BEBOP_PYTHON=PATH           a Python 3.11 or 3.12 for the set-up
  BEBOP_HOME=DIR              cache of policies and text; default: ~/.cache/bebop
TEXT
}

say() { printf 'bebop: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

accelerator() {
  case "${BEBOP_ACCELERATOR:-}" in
    cpu | gpu) echo "$BEBOP_ACCELERATOR" ;;
    "") if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q .; then echo gpu; else echo cpu; fi ;;
    *) die "BEBOP_ACCELERATOR=$BEBOP_ACCELERATOR: expected cpu or gpu" ;;
  esac
}

# A Python that the lock was made for, or one clear line.
find_python() {
  local candidate version
  for candidate in ${BEBOP_PYTHON:+"$BEBOP_PYTHON"} python3.11 python3.12 python3 python; do
    version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case "$version" in 3.11 | 3.12) echo "$candidate"; return ;; esac
    [ -z "${BEBOP_PYTHON:-}" ] || die "BEBOP_PYTHON=$BEBOP_PYTHON is Python $version; bebop needs Python 3.11 or 3.12"
  done
  die "no Python 3.11 or 3.12 found (python3 is $(python3 --version 2>&1 | head -n 1)); install one, or set BEBOP_PYTHON to it"
}

setup() {
  local kind stamp python links
  kind=$(accelerator)
  stamp="$kind $(cat "requirements/$kind.lock" "requirements/overrides-$kind.txt" pyproject.toml | sha256sum | cut -c1-32)"
  if [ -x .venv/bin/python ] && [ "$(cat .venv/bebop-stamp 2>/dev/null)" = "$stamp" ] && .venv/bin/python -c '' 2>/dev/null; then
    return
  fi
  exec 7>.setup.lock
  if command -v flock >/dev/null 2>&1; then flock 7; fi
  python=$(find_python)
  say "set-up for $kind with $("$python" --version), in .venv"
  if ! [ -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear .venv || die "$python cannot make a virtual environment (on Debian: apt install python3-venv)"
  fi
  rm -f .venv/bebop-stamp
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"
  # uv does not read pip's settings, so the folders of wheels named there are passed on. On a GPU machine, a folder with a
  # CPU build of torch is left out, because uv would prefer that build. A CPU machine without such a folder asks uv for it.
  links=$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)
  local options=(--python .venv/bin/python --overrides "requirements/overrides-$kind.txt" -r "requirements/$kind.lock")
  local link cpu_torch=""
  for link in $links; do
    if compgen -G "$link/torch-*+cpu*.whl" >/dev/null; then
      cpu_torch=1
      [ "$kind" = cpu ] || continue
    fi
    options+=(--find-links "$link")
  done
  if [ "$kind" = cpu ] && [ -z "$cpu_torch" ]; then options+=(--torch-backend cpu); fi
  say "installing the packages of requirements/$kind.lock"
  .venv/bin/uv pip install "${options[@]}"
  if [ "$kind" = gpu ]; then
    .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None and torch.version.hip is None)' ||
      die "a CPU build of torch was installed on a GPU machine; leave it out of pip's find-links, or set BEBOP_ACCELERATOR=cpu"
  fi
  say "installing bebop"
  .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
  say "compiling Python files (once, for faster starts)"
  .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
  echo "$stamp" >.venv/bebop-stamp
  say "set-up done"
  exec 7>&-
}

command=${1:-help}
[ $# -eq 0 ] || shift
case "$command" in
  help | -h | --help) usage ;;
  setup) setup ;;
  test)
    setup
    if [ "${1:-}" = quick ]; then shift; exec .venv/bin/python -m pytest -m "not e2e" "$@"; fi
    exec .venv/bin/python -m pytest "$@"
    ;;
  demo | sft | grpo | eval | bench | report | monitor | doctor)
    setup
    exec .venv/bin/bebop "$command" "$@"
    ;;
  *) usage >&2; die "unknown command '$command'" ;;
esac
