"""What leaves the trainer is the checkpoint it came from: names, forms, values, each tensor once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.engines.weights import Layout
from bebop.mtp.checkpoint import Tensors, write_checkpoint
from bebop.mtp.names import from_checkpoint
from bebop.policies import random_checkpoint
from bebop.rl.trainer.outgoing import Outgoing

FAMILIES = (
    *("qwen2", "mimo", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "glm4_moe"),
    *("llama", "mistral", "qwen3", "qwen3_moe"),
)


def load(policy: Path) -> torch.nn.Module:
    """The policy as verl's trainer has it."""
    from transformers import AutoModelForCausalLM

    import bebop.mtp.mimo  # noqa: F401

    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_leaves_under_its_checkpoints_names(tmp_path: Path, model_type: str):
    policy = random_checkpoint(tmp_path, model_type=model_type, num_heads=4)
    outgoing, source = Outgoing(load(policy), Layout(policy)), Tensors(policy)
    sent = list(outgoing.backbone("cpu", torch.float32))
    assert len(dict(sent)) == len(sent)
    assert dict(sent).keys() | outgoing.heads.keys() == set(source) - outgoing.layout.copies
    assert not dict(sent).keys() & outgoing.layout.heads
    assert outgoing.heads
    for name, tensor in (*sent, *outgoing.heads.items()):
        assert torch.equal(tensor, source[name])


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_leave_in_the_form_they_came_in(tmp_path: Path, stacked: bool):
    policy = random_checkpoint(tmp_path / "one-by-one", model_type="qwen3_5_moe_text", num_heads=4)
    if stacked:
        tensors, layout = load_file(policy / "model.safetensors"), Layout(policy)
        heads = {name: tensors.pop(name) for name in layout.heads}
        save_file(heads | from_checkpoint({"": ""}, tensors), policy / "model.safetensors", metadata={"format": "pt"})
    outgoing, source = Outgoing(load(policy), Layout(policy)), Tensors(policy)
    sent = dict(outgoing.backbone("cpu", torch.float32))
    assert sent.keys() == set(source) - outgoing.layout.heads
    assert any(name.endswith(".experts.gate_up_proj") for name in sent) == stacked
    assert all(torch.equal(tensor, source[name]) for name, tensor in sent.items())


def tie(policy: Path, *, copy: bool) -> Path:
    """The policy with tied embeddings; with a copy of them as lm_head, as some tools write it."""
    config = json.loads((policy / "config.json").read_text()) | {"tie_word_embeddings": True}
    (policy / "config.json").write_text(json.dumps(config))
    tensors = load_file(policy / "model.safetensors")
    del tensors["lm_head.weight"]
    if copy:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    return policy


@pytest.mark.parametrize("copy", [False, True])
def test_tied_tensor_is_sent_once_and_saved_under_all_names(tmp_path: Path, copy: bool):
    policy = tie(random_checkpoint(tmp_path / "policy"), copy=copy)
    outgoing = Outgoing(load(policy), Layout(policy))
    with torch.no_grad():
        outgoing.module.model.embed_tokens.weight.add_(1)
    sent = dict(outgoing.backbone("cpu", torch.float32))
    assert "model.embed_tokens.weight" in sent and "lm_head.weight" not in sent
    for name in list(sent):
        sent |= dict(outgoing.copies(name, sent[name]))
    written = Tensors(write_checkpoint(policy, tmp_path / "saved", sent, {}))
    assert set(written) == set(Tensors(policy))
    assert torch.equal(written["model.embed_tokens.weight"], outgoing.module.model.embed_tokens.weight)
    assert not copy or torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


def test_copies_among_the_heads_stay_behind(tmp_path: Path):
    """GLM's and DeepSeek's MTP layers carry an embedding and an output matrix that would overwrite trained ones."""
    policy = random_checkpoint(tmp_path, model_type="glm4_moe", num_heads=4)
    tensors = load_file(policy / "model.safetensors")
    copies = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    tensors |= {name: torch.zeros_like(tensors["lm_head.weight"]) for name in copies}
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    outgoing = Outgoing(load(policy), Layout(policy))
    assert outgoing.layout.copies == copies
    sent = outgoing.heads.keys() | dict(outgoing.backbone("cpu", torch.float32)).keys()
    assert not copies & sent and "model.layers.2.shared_head.norm.weight" in sent


def test_values_leave_in_the_finer_of_both_types(tmp_path: Path):
    policy = random_checkpoint(tmp_path, model_type="glm4_moe", num_heads=4, dtype="bfloat16")
    outgoing = Outgoing(load(policy), Layout(policy))
    for least, wanted in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        types = {name: tensor.dtype for name, tensor in outgoing.backbone("cpu", least)}
        assert types["model.embed_tokens.weight"] == wanted
        assert (
            types["model.layers.1.mlp.gate.e_score_correction_bias"]
            == outgoing.layout.dtypes["model.layers.1.mlp.gate.e_score_correction_bias"]
            or least == torch.float32
        )


def test_unknown_tensor_is_named_before_anything_is_sent(tmp_path: Path):
    policy = random_checkpoint(tmp_path / "policy")
    model = load(policy)
    tensors = load_file(policy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight: .* has no tensor of this name"):
        Outgoing(model, Layout(policy))
