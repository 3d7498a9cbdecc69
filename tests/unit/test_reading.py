"""One reading of a policy directory: one with a fault is refused in one line, or every reader agrees on it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.backbone import load_backbone
from bebop.config import RolloutSection
from bebop.data.tokenizer import encode_prompt, load_tokenizer
from bebop.doctor.readers import by_backbone, by_engine, by_transformers, check_readers, compare, text_ids
from bebop.engines import check_policy
from bebop.errors import BadInput, EngineRefused
from bebop.mtp import load_heads
from bebop.mtp.reading import read_policy
from bebop.policies import random_checkpoint
from bebop.records import Prompt

KINDS = ["qwen2", "llama", "mistral", "mimo", "qwen3_5_text"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    return {kind: random_checkpoint(root / kind, model_type=kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def policy(request, sound, tmp_path):
    """A copy of a sound policy, to be harmed."""
    return shutil.copytree(sound[request.param], tmp_path / "policy")


def change(file, **values):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in (content | values).items() if value is not ...}))


def tensors_of(path, **values):
    """Rewrite some tensors of the file: a new tensor; None to leave it out; a dtype to cast it."""
    held = load_file(path / SINGLE)
    for name, value in values.items():
        if value is None:
            del held[name]
        else:
            held[name] = held[name].to(value) if isinstance(value, torch.dtype) else value
    save_file(held, path / SINGLE, metadata={"format": "pt"})


def rope(path, **values):
    config = json.loads((path / "config.json").read_text())
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 1e4))
    partial = {k: v for k, v in (config.get("rope_parameters") or {}).items() if k == "partial_rotary_factor"}
    change(path / "config.json", rope_parameters={"rope_theta": theta, **partial, **values}, rope_scaling=...)


def quantised(path):
    change(path / "config.json", quantization_config={"quant_method": "fp8"})


def quantised_beside(path):
    (path / "hf_quant_config.json").write_text("{}")


def float8(path):
    tensors_of(path, **{"model.layers.1.mlp.up_proj.weight": torch.float8_e4m3fn})


def two_saves(path):
    shard = "model-00001-of-00001.safetensors"
    shutil.copy(path / SINGLE, path / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(path / shard), shard)}
    (path / INDEX).write_text(json.dumps(index))


def loose_file(path):
    shutil.copy(path / SINGLE, path / "adapter.safetensors")


def falsely_tied(path):
    change(path / "config.json", tie_word_embeddings=True)


def large_tokenizer(path):
    tokenizer = load_tokenizer(path)
    tokenizer.add_tokens([f"<{i}>" for i in range(9)])
    tokenizer.save_pretrained(path)


def no_tokenizer(path):
    for file in [*path.glob("token*"), *path.glob("vocab*"), *path.glob("merges*")]:
        file.unlink()


def missing_shard(path):
    two_saves(path)
    (path / SINGLE).unlink()
    (path / "model-00001-of-00001.safetensors").unlink()


def torn(path):
    whole = (path / SINGLE).read_bytes()
    (path / SINGLE).write_bytes(whole[: len(whole) // 2])


def torn_config(path):
    (path / "config.json").write_text((path / "config.json").read_text()[:-9])


def head_without_tensors(path):
    reading = read_policy(path)
    tensors_of(path, **dict.fromkeys(filter(reading.is_head, reading.shapes)))


def half_a_head(path):
    reading = read_policy(path)
    tensors_of(path, **{next(n for n in sorted(reading.shapes) if reading.is_head(n) and "down_proj" in n): None})


def unused_tensor(path):
    tensors_of(path, **{"model.layers.0.self_attn.sinks": torch.zeros(2)})


def missing_tensor(path):
    tensors_of(path, **{"model.layers.1.mlp.up_proj.weight": None})


def other_shape(path):
    tensors_of(path, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)})


def dynamic(path):
    rope(path, rope_type="dynamic", factor=2.0)


REFUSED = {
    quantised: r"quantization_config \(fp8\)",
    quantised_beside: "hf_quant_config.json",
    float8: "up_proj.weight is float8_e4m3fn",
    two_saves: f"both {SINGLE} and {INDEX}",
    loose_file: "adapter.safetensors",
    falsely_tied: "tie_word_embeddings=true, but lm_head.weight differs",
    large_tokenizer: "its tokenizer has ids up to 423, the model has 415 embeddings",
    no_tokenizer: "no tokenizer can be read",
    missing_shard: "model-00001-of-00001.safetensors, which is not there",
    torn: f"{SINGLE} cannot be read",
    torn_config: "not JSON",
    head_without_tensors: "claims 1 MTP layers",
    half_a_head: "down_proj",
    unused_tensor: "sinks belongs to nothing",
    missing_tensor: r"are missing, such as model\.layers\.1\.mlp\.up_proj\.weight",
    other_shape: r"has shape \[3, 3\], expected \[128, 64\]",
    dynamic: "rope_type=dynamic",
}


def as_it_is(path):
    pass


def mixed_types(path):
    tensors_of(path, **{"model.layers.1.mlp.up_proj.weight": torch.bfloat16, "model.norm.weight": torch.float64})


def yarn(path):
    rope(path, **YARN)


def llama3(path):
    rope(path, **LLAMA3)


def linear(path):
    rope(path, rope_type="linear", factor=2.0)


def without_heads(path):
    reading = read_policy(path)
    tensors_of(path, **dict.fromkeys(filter(reading.is_head, reading.shapes)))
    change(path / "config.json", **{reading.family.count_key: 0})


def sharded(path):
    two_saves(path)
    (path / SINGLE).unlink()


AGREED = [as_it_is, mixed_types, yarn, llama3, linear, without_heads, sharded]


@pytest.mark.parametrize("harm", REFUSED, ids=lambda harm: harm.__name__)
def test_a_fault_is_refused_in_one_line_before_any_work(policy, harm):
    harm(policy)
    with pytest.raises(BadInput, match=REFUSED[harm]) as caught:
        read_policy(policy)
    assert str(policy) in str(caught.value) and "\n" not in str(caught.value)
    for engine in ("vllm", "torch"):
        with pytest.raises(EngineRefused, match=REFUSED[harm]):
            check_policy(RolloutSection(engine=engine, speculation="none"), policy)


@pytest.mark.parametrize("change_it", AGREED, ids=lambda change_it: change_it.__name__)
def test_what_is_not_refused_is_one_policy_to_every_reader(policy, change_it):
    change_it(policy)
    ids = text_ids(policy)
    found = {"transformers": by_transformers(policy, ids), "backbone": by_backbone(policy, ids)}
    if json.loads((policy / "config.json").read_text())["model_type"] != "qwen3_5_text":
        found["torch"] = by_engine("torch", policy, ids)
    rows = list(compare(found, 1e-4))
    assert all(row.passed for row in rows), rows


def test_a_text_ends_where_vllm_ends_it(policy, capsys):
    change(policy / "config.json", eos_token_id=7)  # which generation_config.json overrides
    assert read_policy(policy).end_ids == {411} and not capsys.readouterr().err
    change(policy / "generation_config.json", eos_token_id=[7, 9])
    assert read_policy(policy).end_ids == {7, 9, 411}
    assert "ends at any of the ids [7, 9, 411]" in capsys.readouterr().err
    (policy / "generation_config.json").unlink()
    assert read_policy(policy).end_ids == {7, 411}


def test_weights_that_are_not_finite_are_refused_by_every_loader(policy):
    reading = read_policy(policy)
    head = next(name for name in sorted(reading.shapes) if reading.is_head(name) and "down_proj" in name)
    name = "model.layers.0.mlp.down_proj.weight"
    for broken, load in (
        (name, lambda: load_backbone(policy, dtype=torch.float32)),
        (head, lambda: load_heads(policy)),
    ):
        tensors_of(policy, **{broken: torch.full(reading.shapes[broken], torch.nan)})
        with pytest.raises(BadInput, match=f"{broken} has a NaN or an infinity"):
            load()


def test_missing_chat_template_is_refused_with_the_first_prompt(policy):
    for file in policy.glob("*.jinja"):
        file.unlink()
    change(policy / "tokenizer_config.json", chat_template=...)
    assert read_policy(policy).chat_template is None
    with pytest.raises(BadInput, match=r"it has no chat template; add chat_template\.jinja"):
        encode_prompt(load_tokenizer(policy), Prompt(prompt_id="a", text="hello", task="text"))


def test_doctor_finds_a_fault_that_no_rule_knows(sound, tmp_path):
    """One reader's copy says another rope_theta."""
    copy = shutil.copytree(sound["llama"], tmp_path / "copy")
    rope(copy, rope_type="default", rope_theta=20000.0)
    rows = {row.check: row.passed for row in check_readers(sound["llama"], copy, 1e-4, engines=["torch"])}
    assert rows == {"transformers and backbone": False, "transformers and torch": False, "backbone and torch": True}
    assert all(row.passed for row in check_readers(sound["llama"], sound["llama"], 1e-4, engines=["torch"]))
