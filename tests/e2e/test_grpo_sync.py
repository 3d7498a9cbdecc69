"""Weight syncs of real GRPO runs: a tied policy cut into many buckets, native heads, and receivers that refuse."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from grpo_runs import START_UP_S, check_served, config, finish, no_process_left, start, wait_for_phase, wait_for_step
from safetensors.torch import load_file, save_file

from bebop.config import RolloutSection
from bebop.engines import make_engine
from bebop.monitor import read_steps
from bebop.mtp import checkpoint_checksums
from bebop.policies import random_checkpoint
from bebop.records import Sampling
from bebop.rl import checkpoints

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 2
BUCKETS = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=2"
# Adam's decay takes every weight above 1.2 out of float32's range in the first step
DIVERGES = "actor_rollout_ref.actor.optim.weight_decay=3e41"


def check_checkpoint(run_dir: Path, policy: Path) -> None:
    """The last checkpoint is what the engine served last, loads in vLLM and transformers, and kept its heads."""
    from transformers import AutoModelForCausalLM

    saved, last = checkpoints.policy_dir(run_dir, STEPS), read_steps(run_dir)[-1]
    held = checkpoint_checksums(saved)
    assert (held.backbone, held.heads) == (last.backbone_checksum, last.heads_checksum_engine)
    assert load_file(saved / "model.safetensors").keys() == load_file(policy / "model.safetensors").keys()
    prompt, rollout = [7, 8, 9], RolloutSection(max_model_len=128, max_num_seqs=4, kv_cache_gib=0.25)
    with make_engine(rollout, saved, seed=0, dtype="float32") as engine:
        (answer,) = engine.generate([prompt], Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer.token_ids)


@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_a_tied_policy_in_many_buckets_is_served_as_trained(tmp_path: Path, engine: str):
    policy = random_checkpoint(tmp_path / "policy", model_type="llama", tied=True, hidden_size=256, num_heads=4)
    tree = {"engine": "torch", "tree": "rheo", "tree_width": 3, "tree_depth": 4, "tree_budget": 10}
    mode, rollout = ("sync", tree) if engine == "torch" else ("colocate_async", {})
    values = config(mode, rollout=rollout, verl=(BUCKETS,), steps=STEPS, save_every=STEPS)
    finish(start(values, tmp_path / "run", policy))
    assert no_process_left(tmp_path / "run", within_s=0)
    check_served(read_steps(tmp_path / "run"), STEPS)
    if engine == "vllm":
        check_checkpoint(tmp_path / "run", policy)


def test_native_heads_and_stacked_experts_are_served_as_trained(tmp_path: Path):
    policy = random_checkpoint(tmp_path / "policy", model_type="glm4_moe", num_heads=4)
    finish(start(config("sync", steps=STEPS, save_every=STEPS), tmp_path / "run", policy))
    check_served(read_steps(tmp_path / "run"), STEPS)
    check_checkpoint(tmp_path / "run", policy)


@pytest.mark.parametrize(("engine", "first"), [("vllm", True), ("vllm", False), ("torch", False)])
def test_receivers_error_ends_the_run_within_a_minute(tmp_path: Path, engine: str, first: bool):
    policy = random_checkpoint(tmp_path / "policy", hidden_size=256)
    if first:
        tensors = load_file(policy / "model.safetensors")
        tensors["model.embed_tokens.weight"][3, 4] = torch.nan
        save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    verl = (BUCKETS,) if first else (BUCKETS, DIVERGES)
    run_dir = tmp_path / "run"
    process = start(config("sync", rollout={"engine": engine}, verl=verl, steps=50, save_every=50), run_dir, policy)
    if first:
        wait_for_phase(process, run_dir, "first weight sync")
    else:
        wait_for_step(process, run_dir, 1)
    since = time.monotonic()
    output, _ = process.communicate(timeout=START_UP_S)
    assert process.returncode != 0 and time.monotonic() - since < 60
    assert "model.embed_tokens.weight: got a NaN or an infinity" in output.splitlines()[-1], output
    assert no_process_left(run_dir, within_s=0)
    assert len(read_steps(run_dir)) == (0 if first else 1)
