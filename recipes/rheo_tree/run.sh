#!/usr/bin/env bash
# Heads for the tiny policy, then every chain and tree on them.
set -e
root="$(dirname "${BASH_SOURCE[0]}")/../.."
"$root/launch.sh" sft run_dir=runs/rheo_tree/heads
exec "$root/launch.sh" bench recipe=rheo_tree model=hf model.path=runs/rheo_tree/heads/checkpoint model.dtype=float32 "$@"
