"""Every family's drafts in training equal those of vLLM's own module: one q at every depth, float32.

The engine runs whole, on small random checkpoints that it loads as they are: MLA, q/k norms, gates, partial rotary,
shared key heads and experts are its own kernels. Decoders have full attention here: vLLM 0.31's gated delta net has no
float32 kernel on a CPU (the head has none in any family; transformers' own is tested in test_families.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bebop.backbone import load_backbone
from bebop.config import Data, Loss, Model, RolloutSection, Sft, SftConfig, Task
from bebop.data import pack
from bebop.data.self_distill import read_rows
from bebop.engines import make_engine
from bebop.mtp import draft_hidden, load_heads
from bebop.mtp.checkpoint import Tensors
from bebop.policies import random_checkpoint
from bebop.records import Sampling
from bebop.sft import run

DEPTH = 3
# the engine's attention on a CPU takes heads of a width of 32 and more
POLICIES = {
    **{name: {} for name in ("qwen3_5_text", "qwen3_next", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text")},
    "mimo": {"num_heads": 2},
    "llama": {"num_heads": 2, "tied": True},
    "qwen3": {"num_heads": 2, "head_dim": 64},  # num_heads * head_dim is not hidden_size
    "qwen3_moe": {"head_dim": 32},
}


@pytest.fixture(scope="module")
def folder(repo, tmp_path_factory) -> Path:
    """One random policy of each family, and the drafts of a real run on it: a prompt of one token, and longer ones."""
    folder = tmp_path_factory.mktemp("families")
    for seed, (model_type, values) in enumerate(POLICIES.items()):
        values = {"num_heads": 4} | values
        random_checkpoint(folder / model_type, model_type=model_type, seed=seed, linear_layers=False, **values)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 300, (n,), generator=generator).tolist() for n in (1, 2, 7, 33, 70)]
    (folder / "rounds.json").write_text(json.dumps([prompts]))
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).with_name("record_family_drafts.py")
    command = [sys.executable, script, folder, folder / "rounds.json", *POLICIES]
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", POLICIES)
@torch.no_grad()
def test_training_drafts_equal_the_engines_in_every_family(folder, model_type):
    records = [r for r in records_of(folder, model_type) if r["temperature"] == 1.0]
    backbone = load_backbone(folder / model_type, dtype=torch.float32)
    head = load_heads(folder / model_type)
    documents = [[*r["text"][: r["anchor"] + 1], r["next"], *r["drafts"][: DEPTH - 1]] for r in records]
    (batch,) = pack([(ids, [1] * len(ids)) for ids in documents], 1 << 20)
    hidden = backbone.hidden(batch.input_ids, batch.position_ids, batch.cu_seqlens)
    packed = (batch.input_ids, batch.cu_seqlens, batch.position_ids)
    anchors = batch.cu_seqlens[:-1].long() + torch.tensor([r["anchor"] for r in records])
    rows = draft_hidden(head, hidden, backbone.embed_weight, *packed, DEPTH, anchors=anchors)
    q = (rows @ backbone.lm_head_weight.T).softmax(-1).transpose(0, 1)
    worst = (q - torch.stack([r["q"] for r in records])).abs().amax((0, 2))
    print(f"{model_type}: {len(records)} drafts, largest |q - q engine| at depths 1..{DEPTH}: {worst.tolist()}")
    assert len(records) > 30
    assert any(r["anchor"] == 0 for r in records), "no anchor at position 0, where some families mask the embedding"
    assert (worst < 1e-4).all()


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", POLICIES)
@torch.no_grad()
def test_greedy_text_with_speculation_is_that_of_transformers(folder, model_type):
    model = load_backbone(folder / model_type, dtype=torch.float32).model
    texts = {tuple(r["text"]) for r in records_of(folder, model_type) if r["temperature"] == 0.0}
    assert len(texts) == 5
    for text in texts:
        length = len(text) - 24
        expected = model(torch.tensor([text]), use_cache=False).logits[0, length - 1 : -1].argmax(-1)
        assert list(text[length:]) == expected.tolist()


def records_of(folder: Path, model_type: str) -> list[dict]:
    """Drafts of a real run. A last step may accept beyond max_tokens: its text is cut, so its anchor is not in it."""
    failed = folder / f"{model_type}.txt"
    assert not failed.exists(), failed.read_text()[-3000:]
    return [r for r in torch.load(folder / f"{model_type}.pt") if r["anchor"] < len(r["text"])]


@pytest.mark.e2e
def test_fresh_qwen3_5_heads_are_accepted_as_scored(tmp_path, monkeypatch):
    """Self-distilled text, fresh heads from the last layer, the directory into vLLM as it is, by bebop's own stages."""
    monkeypatch.setenv("BEBOP_HOME", str(tmp_path / "home"))
    policy = random_checkpoint(tmp_path / "policy", model_type="qwen3_5_text", linear_layers=False, mtp=False)
    rollout = RolloutSection(max_model_len=256, kv_cache_gib=0.5)
    config = SftConfig(
        model=Model(name="hf", path=policy),
        data=Data(tasks=[Task(name="chain_sum")], num_prompts=96, num_heldout=64, max_response_tokens=48),
        loss=Loss(),
        sft=Sft(steps=30, eval_every=30, save_every=30, batch_tokens=2048, lr=3e-3),
        rollout=rollout,
    )
    result = run(config, tmp_path / "run")
    before, after = Tensors(policy), Tensors(result.checkpoint)
    assert {name for name in after if name not in before} == {n for n in after if n.startswith("mtp.")} != set()
    assert all(torch.equal(after[name], before[name]) for name in before)
    (text,) = (tmp_path / "home" / "text").glob("*/heldout.parquet")
    prompts = [row.prompt_ids for row in read_rows(text)] * 2
    with make_engine(rollout, result.checkpoint, seed=5) as engine:
        rollouts = engine.generate(prompts, Sampling(max_tokens=48))
    drafts = sum(r.counts.num_drafts for r in rollouts)
    scored = result.summary["acceptance_length"]
    sampled = 1 + sum(sum(r.counts.accepted_per_depth) for r in rollouts) / drafts
    print(f"AL scored {scored:.3f}, sampled {sampled:.3f} over {drafts} drafts")
    assert drafts > 1000 and scored > result.summary["acceptance_length_before"]
    assert abs(sampled - scored) < 0.12
