"""Hugging Face directories as policies: those of a known family as they stand, Llama-shaped ones in the MiMo layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bebop.backbone import load_backbone
from bebop.config import Model
from bebop.data.tokenizer import load_tokenizer
from bebop.engines.torch_engine.model import Policy
from bebop.mtp import init_heads, load_heads
from bebop.mtp.checkpoint import INDEX, Tensors
from bebop.policies import prepare_policy, random_checkpoint

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BEBOP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def save(tmp_path, kind: str, **values) -> tuple[Path, object]:
    """A random model of transformers in several shards, with the tiny policy's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = load_tokenizer(random_checkpoint(tmp_path / "tok", mtp=False))
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), intermediate_size=48, **SHAPE, **values)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / kind, max_shard_size="40KB")
    tokenizer.save_pretrained(tmp_path / kind)
    return tmp_path / kind, model


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5_text", "glm4_moe"])
@pytest.mark.parametrize("mtp", [True, False])
def test_a_directory_of_a_known_family_is_a_policy_as_it_stands(tmp_path, home, kind, mtp):
    source = random_checkpoint(tmp_path / kind, model_type=kind, mtp=mtp)
    assert prepare_policy(Model(name="hf", path=source), 0) == source.resolve()
    assert (load_heads(source) is not None) == mtp


@torch.no_grad()
def test_a_published_mimo_is_read_as_the_layout_without_its_own_code(tmp_path):
    """The same weights say the same under either model_type, to training and to the torch engine."""
    mimo, layout = (random_checkpoint(tmp_path / kind, model_type=kind) for kind in ("mimo", "qwen2"))
    config = json.loads((mimo / "config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == "configuration_mimo.MiMoConfig" and not list(mimo.glob("*.py"))
    (layout / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    ids = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    expected, got = (load_backbone(path, dtype=torch.float32).model(ids).logits for path in (layout, mimo))
    assert torch.equal(expected, got)
    assert load_tokenizer(mimo).get_vocab() == load_tokenizer(layout).get_vocab()
    place = {"heads": True, "num_positions": 64, "dtype": torch.float32, "device": torch.device("cpu")}
    expected, got = (Policy(path, **place).views for path in (layout, mimo))
    assert expected.keys() == got.keys() and all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("kind", "values"), [("llama", {}), ("mistral", {"sliding_window": None})])
def test_a_sharded_llama_shaped_model_maps_shard_by_shard_with_equal_logits(tmp_path, home, kind, values):
    source, model = save(tmp_path, kind, **values)
    made = prepare_policy(Model(name="hf", path=source, dtype="float32"), 0)
    before, after = Tensors(source), Tensors(made)
    assert (made / INDEX).exists() and len(set(before.files.values())) > 2
    for name, tensor in before.items():
        assert after.files[name] == before.files[name] and torch.equal(after[name], tensor), name
    extra = set(after) - set(before)
    assert {n for n in extra if not n.startswith("model.mtp_layers.")} == {
        f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkv"
    }
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    assert (load_backbone(made, dtype=torch.float32).model(ids).logits - model(ids).logits).abs().max() < 1e-5
    expected = init_heads(made, "last_layer").state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in load_heads(made).state_dict().items())
    assert json.loads((made / "config.json").read_text())["architectures"] == ["MiMoForCausalLM"]


def test_what_the_layout_cannot_hold_is_refused_by_its_key(tmp_path, home):
    for kind, values, message in (
        ("mistral", {"sliding_window": 64}, "sliding_window=64"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true"),
        ("llama", {"head_dim": 16}, "head_dim=16"),
        ("qwen3", {"head_dim": 8}, "model_type qwen3 .*expected model_type qwen2"),
    ):
        source, _ = save(tmp_path / f"{kind}-{next(iter(values))}", kind, **values)
        with pytest.raises(ValueError, match=message) as error:
            prepare_policy(Model(name="hf", path=source), 0)
        assert "\n" not in str(error.value)
