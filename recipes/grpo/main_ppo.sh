#!/usr/bin/env bash
# verl's own main_ppo with bebop as a plug-in: the tiny policy, 3 steps, on a CPU, without bebop's command line.
#   recipes/grpo/main_ppo.sh [folder for the run] [more keys of verl]
# Needs a finished set-up (./launch.sh setup).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
run="$(realpath -m "${1:-runs/main_ppo}")"
shift || true
python="$root/.venv/bin/python"
mkdir -p "$run"

# A policy with MTP heads, and prompts as verl's parquet. Any Hugging Face folder with heads, and any data of verl, will do.
policy="$("$python" "$root/recipes/grpo/main_ppo_data.py" "$run")"

# 1. Name the plug-in: this sets VERL_USE_EXTERNAL_MODULES=bebop.rl.verl.plugin, and what verl and vLLM need on this machine.
eval "$("$python" -m bebop.rl.verl)"

# 2. Add base.yaml (and on a CPU cpu.yaml) to verl's config. All other keys are verl's, and yours.
exec "$python" -m verl.trainer.main_ppo \
  'hydra.searchpath=[pkg://bebop.rl]' '+verl=[base,cpu]' \
  hydra.run.dir="$run" \
  bebop.run_dir="$run" \
  actor_rollout_ref.model.path="$policy" \
  data.train_files="$run/prompts.parquet" data.val_files="$run/prompts.parquet" \
  data.train_batch_size=4 data.max_prompt_length=96 data.max_response_length=48 \
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.max_model_len=160 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.optim.lr=1e-4 \
  trainer.total_training_steps=3 trainer.val_before_train=false 'trainer.logger=[console]' \
  "$@"
