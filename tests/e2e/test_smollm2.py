"""SmolLM2 out of its package: the original's logits and tokens, and its shortest way through heads, GRPO and report."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from grpo_runs import check_checkpoint, check_served, config, finish, no_process_left, start, wait_for

from bebop import sft
from bebop.backbone import load_backbone
from bebop.config import Model, check
from bebop.data.tokenizer import encode_prompt, load_tokenizer
from bebop.monitor import read_steps
from bebop.policies import prepare_policy
from bebop.policies.smollm2 import find_smollm2, load_smollm2
from bebop.records import Prompt
from bebop.rl import checkpoints

TEXTS = (
    "What is 12 + 3456?",
    "Hello  world 1234\n\n  héllo ✓ \ttab 日本",
    "a  5 6\r\n é e\u0301 3.14  \n<|im_start|>user\nit's<|im_end|>\n",
    "   \n \n\n  x = [1, 22,333]\n",
)


@pytest.fixture(scope="module")
def original():
    return load_smollm2(find_smollm2())


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEBOP_HOME", str(tmp_path_factory.mktemp("home")))
        return prepare_policy(Model(name="smollm2", dtype="bfloat16"), 0)


@pytest.mark.e2e
def test_tokens_are_the_originals(policy, original):
    tokenizer = load_tokenizer(policy)
    for text in TEXTS:
        assert tokenizer.encode(text) == original[1].encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == json.loads((policy / "config.json").read_text())["eos_token_id"]
    prompt = Prompt(prompt_id="p", task="t", text="Hi")
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.e2e
def test_logits_are_the_originals_within_bfloat16_rounding(policy, original):
    """The mapping itself is exact: all of the difference is that of rounding the original's weights to bfloat16."""
    network, tokenizer = original
    backbone = load_backbone(policy, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(TEXTS[1] + TEXTS[2])])
    with torch.no_grad():
        exact, mapped = network(ids).logits, backbone.model(ids).logits
        for weight in network.parameters():  # not .to(bfloat16): that would round the rotary frequencies too
            weight.copy_(weight.bfloat16())
        rounded = network(ids).logits
    assert (mapped - rounded).abs().max() < 1e-3
    assert (mapped - exact).abs().mean() < 0.02 * exact.abs().mean()


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_heads_serve_grpo_that_is_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In float32, with speculation, its tied embeddings in another bucket than most layers; recipes/smollm2 has all."""
    monkeypatch.setenv("BEBOP_HOME", str(tmp_path / "home"))
    steps, run_dir = 3, tmp_path / "run"
    values = {
        "model": {"name": "smollm2"},
        "data": {"tasks": [{"name": "chain_sum"}], "num_prompts": 16, "num_heldout": 8, "max_response_tokens": 32},
        "loss": {},
        "sft": {"steps": 4, "batch_tokens": 512},
        "rollout": {"max_model_len": 160, "max_num_seqs": 16, "kv_cache_gib": 0.25, "temperature": 0.9},
        "logger": {"wandb": "disabled"},
    }
    heads = sft.run(check("sft", values), tmp_path / "sft").checkpoint
    buckets = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128"
    grpo = {"steps": steps, "save_every": 2, "prompts_per_step": 2, "group_size": 4, "lr": 1e-5}
    run = config("sync", verl=(buckets,), **grpo)
    first = start(run, run_dir, heads)
    wait_for(first, run_dir, "checkpoint of step 2", lambda: checkpoints.latest(run_dir) == 2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert no_process_left(run_dir, within_s=20)
    finish(start(run, run_dir, heads))
    assert no_process_left(run_dir, within_s=0)
    # transformers itself differs by 1.05e-5 between its attentions, over these 30 layers
    check_served(read_steps(run_dir), steps, rounding=2e-5)
    check_checkpoint(run_dir, heads, steps)
    assert "acceptance" in (run_dir / "report.html").read_text().lower()
