#!/usr/bin/env bash
# SmolLM2 through every stage: heads, eval, planner, GRPO in both trainer modes, kill -9 and resume, report, table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bebop=./launch.sh
runs="${RUNS:-runs/smollm2}"
$bebop sft recipe=smollm2 run_dir="$runs/sft" sft.optimizer=muon sft.lr=0.004 sft.batch_tokens=1024 \
  sft.compute_dtype=bfloat16 sft.regression_steps=40 sft.steps=16 sft.eval_every=16 "$@"

heads=(recipe=smollm2 model=hf model.dtype=float32 model.path="$runs/sft/checkpoint")
$bebop eval "${heads[@]}" run_dir="$runs/eval" "$@"
$bebop bench "${heads[@]}" run_dir="$runs/planner" bench.batch_sizes=[8] bench.repeats=1 "$@"

# The policy solves nothing in 64 tokens, so any text earns some of this reward. Weights go to the engine in buckets of
# 128 MB, so that the embeddings and most layers are in different ones.
grpo=(grpo.prompts_per_step=4 grpo.group_size=4 grpo.reward_function=recipes/families/reward.py:compute_score
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128)
$bebop grpo "${heads[@]}" "${grpo[@]}" run_dir="$runs/sync" trainer=sync grpo.steps=3 "$@"

async=($bebop grpo "${heads[@]}" "${grpo[@]}" run_dir="$runs/async" trainer=colocate_async grpo.steps=4 grpo.save_every=2 "$@")
if [ ! -e "$runs/async/summary.json" ]; then
  "${async[@]}" &
  pid=$!
  until [ -e "$runs/async/checkpoints/step_2/complete.json" ]; do # its checkpoint after step 2
    kill -0 $pid || { wait $pid; exit 1; }
    sleep 1
  done
  kill -9 $pid
  wait $pid || echo "killed after step 2; the same command resumes it"
  "${async[@]}"
fi

# the heads after RL: what the engine accepts against what the heads score on the same text
$bebop eval "${heads[@]}" model.path="$runs/async/checkpoints/step_4/policy" run_dir="$runs/eval_after" "$@"
$bebop report "$runs/async"
.venv/bin/python recipes/smollm2/table.py "$runs"
