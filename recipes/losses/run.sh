#!/usr/bin/env bash
# A start that all share, then every loss from it, with the same text, steps, order and seed; ends with the table.
set -euo pipefail
launch="$(dirname "${BASH_SOURCE[0]}")/../../launch.sh"
runs="${RUNS:-runs/losses}"
losses=hard_ce,kl,reverse_kl,tv,lk,lk_hybrid,e2e_tv,e2e_tv_after_lk
"$launch" sft recipe=losses run_dir="$runs/start" sft.regression_steps=600 sft.steps=0
"$launch" sft recipe=losses model=hf model.path="$runs/start/checkpoint" model.dtype=bfloat16 run_dir="$runs" \
    -m loss=$losses "$@"
