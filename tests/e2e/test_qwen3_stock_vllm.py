"""A Qwen3 in the MiMo layout: a vLLM without bebop serves the policy and its heads exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bebop.backbone import load_backbone
from bebop.config import Model
from bebop.data import pack
from bebop.mtp import draft_hidden, load_heads
from bebop.policies import prepare_policy, random_checkpoint

DEPTH = 3
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def policy(request, tmp_path_factory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(random_checkpoint(folder / "tokenizer", mtp=False))
    sizes = {"vocab_size": len(tokenizer), "intermediate_size": 128, "max_position_embeddings": 512}
    config = AutoConfig.for_model("qwen3", **SHAPE, **sizes, tie_word_embeddings=request.param)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # far enough from 0 that every part shows in the logits
        for name, parameter in network.named_parameters():
            parameter.normal_(float("norm" in name), 0.2)
    network.save_pretrained(folder / "published")
    tokenizer.save_pretrained(folder / "published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEBOP_HOME", str(folder / "home"))
        return prepare_policy(Model(name="hf", path=folder / "published", dtype="float32"), 0)


@pytest.fixture(scope="module")
def served(policy, tmp_path_factory) -> tuple[list[list[int]], list[list[int]], list[dict]]:
    """Prompts, the greedy text of each, and the drafts of a run at T = 1."""
    folder = tmp_path_factory.mktemp("served")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 300, (n,), generator=generator).tolist() for n in (1, 2, 7, 33, 70)]
    (folder / "rounds.json").write_text(json.dumps([prompts]))
    environment = os.environ | {
        "VLLM_PLUGINS": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).with_name("stock_vllm.py")
    command = [sys.executable, script, folder / "rounds.json", folder / "drafts.pt", folder / "texts.json"]
    done = subprocess.run(command, cwd=policy, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return prompts, json.loads((folder / "texts.json").read_text()), torch.load(folder / "drafts.pt")


@pytest.mark.e2e
def test_a_stock_vllm_writes_transformers_greedy_text(policy, served):
    from transformers import Qwen3ForCausalLM

    prompts, texts, _ = served
    network = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for prompt, text in zip(prompts, texts, strict=True):
        expected = network.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        assert text == expected[0, len(prompt) :].tolist()


@pytest.mark.e2e
@torch.no_grad()
def test_a_stock_vllm_drafts_what_training_computes(policy, served):
    records = [r for r in served[2] if r["anchor"] < len(r["text"])]
    backbone, head = load_backbone(policy, dtype=torch.float32), load_heads(policy)
    documents = [[*r["text"][: r["anchor"] + 1], r["next"], *r["drafts"][: DEPTH - 1]] for r in records]
    (batch,) = pack([(ids, [1] * len(ids)) for ids in documents], 1 << 20)
    packed = (batch.input_ids, batch.cu_seqlens, batch.position_ids)
    hidden = backbone.hidden(batch.input_ids, batch.position_ids, batch.cu_seqlens)
    anchors = batch.cu_seqlens[:-1].long() + torch.tensor([r["anchor"] for r in records])
    rows = draft_hidden(head, hidden, backbone.embed_weight, *packed, DEPTH, anchors=anchors)
    q = (rows @ backbone.lm_head_weight.T).softmax(-1).transpose(0, 1)
    worst = (q - torch.stack([r["q"] for r in records])).abs().amax((0, 2))
    print(f"{len(records)} drafts, largest |q - q engine| at depths 1..{DEPTH}: {worst.tolist()}")
    assert len(records) > 30 and (worst < 1e-4).all()
