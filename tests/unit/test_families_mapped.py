"""Hugging Face directories as policies: what has heads as it stands, everything else as a copy with fresh ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.backbone import load_backbone
from bebop.config import Model
from bebop.data.tokenizer import load_tokenizer
from bebop.engines.torch_engine.model import Policy
from bebop.mtp import init_heads, known_family, load_heads
from bebop.mtp.checkpoint import INDEX, Tensors
from bebop.policies import prepare_policy, random_checkpoint

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
OWN_CLASS = [
    ("llama", {"rope_theta": 5000.0, "rms_norm_eps": 1e-5}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": None}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("qwen3_moe", {"head_dim": 16, **EXPERTS}),
]
MIMO_LAYOUT = [("qwen2", {}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {"head_dim": 8})]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BEBOP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@torch.no_grad()
def save(folder: Path, kind: str, shard: str = "40KB", **values) -> tuple[Path, object]:
    """A random model of transformers, in several shards, with the tiny policy's tokenizer and a file of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = load_tokenizer(random_checkpoint(folder / "tok", mtp=False))
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), intermediate_size=48, **SHAPE, **ids, **values)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # biases and norms too
        parameter.add_(0.05 * torch.randn_like(parameter))
    source = folder / kind
    model.save_pretrained(source, max_shard_size=shard)
    tokenizer.save_pretrained(source)
    (source / "LICENSE").write_text("mine\n")
    return source, model


def prepared(source: Path, **values) -> Path:
    return prepare_policy(Model(name="hf", path=source, dtype="float32"), 0, **values)


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def change(directory: Path, **values) -> None:
    (directory / "config.json").write_text(json.dumps(config_of(directory) | values))


@torch.no_grad()
def logits_differ(directory: Path, model, length: int = 40) -> float:
    ids = torch.randint(0, 300, (1, length), generator=torch.Generator().manual_seed(0))
    return float((load_backbone(directory, dtype=torch.float32).model(ids).logits - model(ids).logits).abs().max())


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5_text", "glm4_moe"])
@pytest.mark.parametrize("mtp", [True, False])
def test_directory_of_a_known_family_is_used_unchanged(tmp_path, home, kind, mtp):
    source = random_checkpoint(tmp_path / kind, model_type=kind, mtp=mtp)
    assert prepare_policy(Model(name="hf", path=source), 0) == source.resolve()
    assert (load_heads(source) is not None) == mtp


@torch.no_grad()
def test_published_mimo_is_read_without_its_own_code(tmp_path):
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


@pytest.mark.parametrize(("kind", "values"), [*OWN_CLASS, *MIMO_LAYOUT])
def test_a_policy_keeps_its_type_config_files_and_logits(tmp_path, home, kind, values):
    source, model = save(tmp_path, kind, **values)
    made = prepared(source)
    before, after = Tensors(source), Tensors(made)
    assert (made / INDEX).exists() and len(set(before.files.values())) > 2
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert ("lm_head.weight" in after) != bool(values.get("tie_word_embeddings"))
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", INDEX):
            assert (made / file.name).read_bytes() == file.read_bytes(), file.name
    theirs, ours = config_of(source), config_of(made)
    changed = {"architectures", "qk_norm", "torch_dtype", "dtype", "num_nextn_predict_layers", "tie_word_embeddings"}
    assert {key for key in theirs | ours if theirs.get(key) != ours.get(key)} <= changed
    assert ours["num_nextn_predict_layers"] == 1
    assert logits_differ(made, model) < 1e-5
    assert prepared(made) == made


@pytest.mark.parametrize(("kind", "values"), OWN_CLASS)
def test_policy_unsupported_by_plain_vllm_gets_its_own_heads(tmp_path, home, kind, values):
    source, _ = save(tmp_path, kind, **values)
    made = prepared(source)
    assert known_family(config_of(made)).name == "decoder"
    assert config_of(made)["architectures"] == config_of(source)["architectures"]
    extra = set(Tensors(made)) - set(Tensors(source))
    assert {"mtp.fc.weight", "mtp.norm.weight"} < extra and all(name.startswith("mtp.") for name in extra)
    expected = init_heads(made, "last_layer").state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in load_heads(made).state_dict().items())


@pytest.mark.parametrize(("kind", "values"), MIMO_LAYOUT)
def test_what_a_stock_vllm_serves_exactly_takes_the_mimo_layout(tmp_path, home, kind, values):
    source, _ = save(tmp_path, kind, **values)
    made = prepared(source)
    assert known_family(config_of(made)).name == "mimo" and config_of(made)["architectures"] == ["MiMoForCausalLM"]
    after = Tensors(made)
    layers = [f"model.layers.{i}" for i in range(2)] + ["model.mtp_layers.0"]
    added = set(after) - set(Tensors(source))
    biases = {f"{layer}.self_attn.{part}_proj.bias" for layer in layers for part in "qkv"}
    norms = {f"{layer}.self_attn.{part}_norm.weight" for layer in layers for part in "qk"}
    assert biases <= set(after)
    if kind == "qwen3":
        assert config_of(made)["qk_norm"] is True and norms <= set(after)
        assert not any(after[name].any() for name in biases)
    assert {name for name in added if not name.startswith("model.mtp_layers.")} <= biases
    expected = init_heads(made, "last_layer").state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in load_heads(made).state_dict().items())


def test_weights_are_written_in_the_chosen_type(tmp_path, home):
    source, _ = save(tmp_path, "llama")
    made = prepare_policy(Model(name="hf", path=source, dtype="bfloat16"), 0)
    assert {tensor.dtype for tensor in Tensors(made).values()} == {torch.bfloat16}
    assert config_of(made)["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("kind", "values"),
    [("mistral", {"sliding_window": 64}), ("qwen2", {"use_sliding_window": True, "sliding_window": 64})],
)
def test_active_sliding_window_is_refused_and_inactive_one_ignored(tmp_path, home, caplog, kind, values):
    source, model = save(tmp_path, kind, **values, max_window_layers=0)
    for length in (None, 65):
        with pytest.raises(ValueError, match=r"sliding_window=64.*rollout\.max_model_len"):
            prepared(source, max_model_len=length)
    made = prepared(source, max_model_len=64)
    assert "sliding window of 64 tokens" in caplog.text
    config = config_of(made)
    assert config["sliding_window"] is None and not config.get("use_sliding_window")
    assert config["max_position_embeddings"] == 64
    assert logits_differ(made, model, length=64) < 1e-5


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias=true"),
        ("qwen3_moe", {"attention_bias": True, **EXPERTS}, "attention_bias=true"),
        ("qwen2", {"head_dim": 16}, "head_dim=16"),
    ],
)
def test_what_vllm_computes_otherwise_is_refused_by_its_key(tmp_path, home, kind, values, message):
    source, _ = save(tmp_path, kind, **values)
    with pytest.raises(ValueError, match=message) as error:
        prepared(source)
    assert "\n" not in str(error.value)


def _quantised(source: Path) -> None:
    change(source, quantization_config={"quant_method": "fp8"})


def _float8(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, source / "model.safetensors", {"format": "pt"})


def _two_saves(source: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (source / INDEX).write_text(json.dumps(index))


def _falsely_tied(source: Path) -> None:
    change(source, tie_word_embeddings=True)


def _small(source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 100_000, "content": "<far>"})
    tokenizer["model"]["vocab"]["<far>"] = 100_000
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))


def _no_tokenizer(source: Path) -> None:
    for file in source.glob("*token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_quantised, r"quantization_config \(fp8\)"),
        (_float8, "up_proj.weight is float8_e4m3fn"),
        (_two_saves, "both model.safetensors and model.safetensors.index.json"),
        (_falsely_tied, "tie_word_embeddings=true, but lm_head.weight differs"),
        (_small, "ids up to 100000"),
        (_no_tokenizer, "no tokenizer"),
    ],
)
def test_directory_that_readers_interpret_differently_is_refused(tmp_path, home, harm, message):
    source, _ = save(tmp_path, "llama", shard="1GB")
    harm(source)
    with pytest.raises(ValueError, match=message) as error:
        prepared(source)
    assert "\n" not in str(error.value) and str(source) in str(error.value)


def test_a_tied_copy_of_the_embeddings_is_left_out(tmp_path, home):
    source, model = save(tmp_path, "llama", shard="1GB", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | copy, source / "model.safetensors", {"format": "pt"})
    made = prepared(source)
    assert "lm_head.weight" not in Tensors(made)
    assert logits_differ(made, model) < 1e-5


def test_policies_of_earlier_versions_load_with_and_without_remote_code(tmp_path, home):
    """They were Llamas under model_type qwen2 whose tokenizer had an empty auto_map."""
    from transformers import AutoTokenizer

    source = random_checkpoint(tmp_path / "old")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}  # which Qwen2Tokenizer has not
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = source / "tokenizer_config.json"
    empty = {"tokenizer_class": "TokenizersBackend", "auto_map": {"AutoTokenizer": [None, None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | empty))
    text = "Now 12 +  3\n\n x"
    expected = load_tokenizer(source).encode(text)
    assert expected != load_tokenizer(random_checkpoint(tmp_path / "new")).encode(text)

    made = prepared(source)
    assert made != source and made == prepared(source)
    for trusted in (True, False):
        assert AutoTokenizer.from_pretrained(made, trust_remote_code=trusted).encode(text) == expected
    assert all(torch.equal(Tensors(made)[name], tensor) for name, tensor in Tensors(source).items())
    assert load_heads(made) is not None and load_backbone(made, dtype=torch.float32) is not None
    assert prepared(made) == made
