"""Policies that came without heads, in vLLM's own class beside bebop's drafter: what is sampled, and how it is updated.

That drafts are those of training is in test_families_engine.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.backbone import load_backbone
from bebop.config import RolloutSection
from bebop.doctor import exact
from bebop.engines import make_engine
from bebop.engines.vllm_engine.environment import cpu_environment
from bebop.policies import random_checkpoint
from bebop.records import Sampling

pytestmark = pytest.mark.e2e

SHAPES = {"qwen3": {"head_dim": 64}, "llama": {"tied": True}, "qwen3_moe": {"tied": True}}
PROMPT = (1, 2, 3)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_samples_follow_the_policy_whatever_is_drafted(tmp_path, model_type):
    policy = random_checkpoint(tmp_path / "policy", vocab=8, model_type=model_type, **SHAPES[model_type])
    rollout = RolloutSection(num_speculative_tokens=3, max_num_seqs=64, max_model_len=64, kv_cache_gib=0.25)
    with make_engine(rollout, policy, seed=3) as engine:
        for temperature in (1.0, 0.7):
            before = engine.counts()
            sampling = Sampling(temperature=temperature, max_tokens=exact.LENGTH, logprobs=False, ignore_eos=True)
            rollouts = engine.generate([PROMPT] * 4000, sampling)
            after = engine.counts()
            wanted = exact.joint(policy, PROMPT, temperature)
            p_value, freedom, impossible = exact.chi_square(exact.tally((r.token_ids for r in rollouts), 8), wanted)
            drafts = after.num_drafts - before.num_drafts
            accepted = sum(after.accepted_per_depth) - sum(before.accepted_per_depth)
            print(f"{model_type} T={temperature}: p {p_value:.3f} ({freedom} degrees), AL {1 + accepted / drafts:.2f}")
            assert p_value > 1e-4 and freedom > 100 and not impossible
            assert 0 < accepted < 3 * drafts


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@torch.no_grad()
def test_update_works_in_any_order_and_incomplete_heads_are_refused(repo, tmp_path, model_type):
    before, after = (
        random_checkpoint(tmp_path / str(seed), model_type=model_type, seed=seed, **SHAPES[model_type])
        for seed in (1, 2)
    )
    hollow, gone = shutil.copytree(after, tmp_path / "hollow"), "mtp.layers.0.self_attn.k_proj.weight"
    tensors = load_file(after / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != gone}, hollow / "model.safetensors")
    # a trainer sends a tied policy's lm_head too
    sent = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(sent, after / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out.json"
    command = [sys.executable, Path(__file__).with_name("update_decoder_models.py"), before, after, hollow, out]
    environment = os.environ | cpu_environment() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(out.read_text())

    model = load_backbone(after, dtype=torch.float32).model
    for text in result["texts"]:
        expected = model(torch.tensor([text])).logits[0, len(text) - 25 : -1].argmax(-1)
        assert text[-24:] == expected.tolist()
    assert not result["differ"] and result["num_parameters"] > 20
    assert result["hollow"].startswith("EngineRefused: ") and "\n" not in result["hollow"]
    assert f"1 of its tensors are missing: {gone};" in result["hollow"]
    for name, *loaded in result["loaded"]:
        target, drafter = loaded[: loaded.index("|")], loaded[loaded.index("|") + 1 :]
        assert bool(target) == (not name.startswith("mtp.") and name != "lm_head.weight"), name
        assert bool(drafter) == (name.startswith("mtp.") or name == "model.embed_tokens.weight"), name
