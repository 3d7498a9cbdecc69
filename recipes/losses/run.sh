#!/usr/bin/env bash
# A start that all share, then every loss from it, with the same text, steps, order and seed; ends with the table.
set -euo pipefail
launch="$(dirname "${BASH_SOURCE[0]}")/../../launch.sh"
runs="${RUNS:-runs/losses}"
losses=e2e_tv,hard_ce,kl,reverse_kl,tv,lk,lk_hybrid,e2e_tv_after_lk
"$launch" sft recipe=losses run_dir="$runs/start" sft.regression_steps=600 sft.steps=0 sft.lr=0.006 sft.eval_every=300
"$launch" sft recipe=losses model=hf model.path="$runs/start/checkpoint" run_dir="$runs" -m loss=$losses "$@"
