"""The drafts that training computes are those that the engine serves: one q at every depth, teacher-forced, float32.

Prompts are prefilled whole. Where vLLM 0.31 cuts a prefill into chunks, it gives the head the prompt's last token in
place of the one after the chunk (prepare_next_token_ids_padded), and that position's draft key stays wrong: drafts
after it differ from training's by up to 1e-2, which costs acceptance but changes no sample.
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

from bebop.data import pack
from bebop.mtp import HEAD_PREFIX, draft_hidden, head_state, init_heads, load_heads, write_checkpoint
from bebop.mtp.checkpoint import INDEX

DEPTH = 3


@pytest.fixture(scope="module")
def policy(tiny_random, tmp_path_factory) -> Path:
    """A policy with one key head for two query heads, in two shards, and bebop's own head in a third."""
    plain = tmp_path_factory.mktemp("policy") / "plain"
    shutil.copytree(tiny_random, plain)
    config = json.loads((plain / "config.json").read_text())
    config |= {"num_key_value_heads": 1, "num_nextn_predict_layers": 0, "architectures": ["Qwen2ForCausalLM"]}
    (plain / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    (plain / "model.safetensors").unlink()
    halved = {n: t[: len(t) // 2].clone() if ".k_proj." in n or ".v_proj." in n else t for n, t in tensors.items()}
    shards = {f"model-0000{i + 1}-of-00002.safetensors": {} for i in range(2)}
    for name, tensor in halved.items():
        if not name.startswith(HEAD_PREFIX):
            shards[list(shards)[name.startswith("model.layers.1.")]][name] = tensor
    for file, shard in shards.items():
        save_file(shard, plain / file, metadata={"format": "pt"})
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    (plain / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    head = init_heads(plain, "random", seed=3)
    for name, parameter in head.named_parameters():  # far enough from 0 that every part of the layer shows in q
        torch.nn.init.normal_(parameter, float("norm" in name), 0.2)
    return write_checkpoint(plain, plain.with_name("written"), head_state(head), {"mtp_depth": DEPTH})


@pytest.fixture(scope="module")
def recorded(repo, policy, tmp_path_factory):
    """Drafts of a real run: prompts of 1 to 150 tokens, then two that find their prefix in the cache."""
    folder = tmp_path_factory.mktemp("drafts")
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(5, 300, (150,), generator=generator).tolist()
    rounds = [[torch.randint(5, 300, (n,), generator=generator).tolist() for n in (1, 2, 7, 33)]]
    rounds[0].append([*shared, 7])
    rounds.append([[*shared, 8, 9], [*shared[:128], 10]])
    (folder / "rounds.json").write_text(json.dumps(rounds))
    script = Path(__file__).with_name("record_engine_drafts.py")
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, script, policy, folder / "rounds.json", folder / "out.pt", "1.0", "0.7"]
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.load(folder / "out.pt")


@pytest.mark.e2e
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_training_drafts_equal_the_engines_at_every_depth(recorded, policy, temperature):
    from transformers import Qwen2ForCausalLM

    # A last step may accept beyond max_tokens: its text is cut, so its anchor is not in it.
    records = [r for r in recorded if r["temperature"] == temperature and r["anchor"] < len(r["text"])]
    model = Qwen2ForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    head = load_heads(policy)
    documents = [[*r["text"][: r["anchor"] + 1], r["next"], *r["drafts"][: DEPTH - 1]] for r in records]
    worst = torch.zeros(DEPTH)
    with torch.no_grad():
        for first in range(0, len(records), 16):
            part = slice(first, first + 16)
            (batch,) = pack([(ids, [1] * len(ids)) for ids in documents[part]], 16 * 512)
            hidden = torch.cat([model.model(torch.tensor([ids])).last_hidden_state[0] for ids in documents[part]])
            packed = (batch.input_ids, batch.cu_seqlens, batch.position_ids)
            drafts = draft_hidden(head, hidden, model.model.embed_tokens.weight, *packed, DEPTH)
            for record, start in zip(records[part], batch.cu_seqlens.tolist(), strict=False):
                q = (model.lm_head(drafts[:, start + record["anchor"]]) / temperature).softmax(-1)
                worst = torch.maximum(worst, (q - record["q"]).abs().amax(-1))
    print(f"T={temperature}: {len(records)} drafts, largest |q - q engine| at depths 1..{DEPTH}: {worst.tolist()}")
    assert len(records) > 60
    assert any(record["anchor"] == 0 for record in records), "no anchor at position 0, where the embedding is masked"
    assert any(record["anchor"] > 150 for record in records), "no anchor behind a cached prefix"
    assert (worst < 1e-4).all()
