"""Weight syncs of real GRPO runs: a tied policy cut into many buckets, native heads, and receivers that refuse."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from grpo_runs import (
    START_UP_S,
    check_checkpoint,
    check_served,
    config,
    finish,
    no_process_left,
    start,
    wait_for_step,
)

from bebop.monitor import read_steps
from bebop.policies import random_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 2
BUCKETS = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=2"
# Adam's decay takes every weight above 1.2 out of float32's range in the first step
DIVERGES = "actor_rollout_ref.actor.optim.weight_decay=3e41"


@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_tied_policy_in_many_buckets_is_served_as_trained(tmp_path: Path, engine: str):
    policy = random_checkpoint(tmp_path / "policy", model_type="llama", tied=True, hidden_size=256, num_heads=4)
    tree = {"engine": "torch", "tree": "rheo", "tree_width": 3, "tree_depth": 4, "tree_budget": 10}
    mode, rollout = ("sync", tree) if engine == "torch" else ("colocate_async", {})
    values = config(mode, rollout=rollout, verl=(BUCKETS,), steps=STEPS, save_every=STEPS)
    finish(start(values, tmp_path / "run", policy))
    assert no_process_left(tmp_path / "run", within_s=0)
    check_served(read_steps(tmp_path / "run"), STEPS)
    if engine == "vllm":
        check_checkpoint(tmp_path / "run", policy, STEPS)


def test_native_heads_and_stacked_experts_are_served_as_trained(tmp_path: Path):
    policy = random_checkpoint(tmp_path / "policy", model_type="glm4_moe", num_heads=4)
    finish(start(config("sync", steps=STEPS, save_every=STEPS), tmp_path / "run", policy))
    check_served(read_steps(tmp_path / "run"), STEPS)
    check_checkpoint(tmp_path / "run", policy, STEPS)


@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_receivers_error_ends_the_run_within_a_minute(tmp_path: Path, engine: str):
    policy = random_checkpoint(tmp_path / "policy", hidden_size=256)
    run_dir = tmp_path / "run"
    values = config("sync", rollout={"engine": engine}, verl=(BUCKETS, DIVERGES), steps=50, save_every=50)
    process = start(values, run_dir, policy)
    wait_for_step(process, run_dir, 1)
    since = time.monotonic()
    output, _ = process.communicate(timeout=START_UP_S)
    assert process.returncode != 0 and time.monotonic() - since < 60
    assert "model.embed_tokens.weight: got a NaN or an infinity" in output.splitlines()[-1], output
    assert no_process_left(run_dir, within_s=0)
    assert len(read_steps(run_dir)) == 1
