"""What an engine refuses before anything starts, and the small pure parts around it."""

import json
import os

import pytest
import torch
from torch import nn

from bebop.config import RolloutSection
from bebop.engines import ENGINES, check_policy
from bebop.engines.vllm_engine.arguments import (
    engine_arguments,
    refuse_block,
    sampling_values,
    stamp,
)
from bebop.engines.vllm_engine.environment import GENERAL, applied, cpu_environment, last_error, missing
from bebop.engines.vllm_engine.worker import named_views
from bebop.engines.weights import replace_tensors
from bebop.errors import ConfigError, EngineRefused
from bebop.records import Sampling


def policy(path, depth=None, layers=1):
    (path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": layers}))
    (path / "bebop.json").write_text(json.dumps({} if depth is None else {"mtp_depth": depth}))
    return path


def test_draft_longer_than_the_head_was_trained_names_both_numbers_and_keys(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_policy(RolloutSection(num_speculative_tokens=4), policy(tmp_path, depth=3))
    for part in ("rollout.num_speculative_tokens", "4", "sft.depth", "3"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("config", "mixed"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"text_config": {"linear_num_value_heads": 8}}, True),
        ({"layer_types": ["full_attention"], "linear_num_value_heads": 8}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("cpu", [True, False])
def test_hybrids_run_without_prefix_cache_and_in_bfloat16_on_a_cpu(tmp_path, monkeypatch, config, mixed, cpu):
    monkeypatch.setattr("bebop.engines.vllm_engine.fixes.on_cpu", lambda: cpu)
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = engine_arguments(RolloutSection(), tmp_path, seed=0, dtype="bfloat16")
    assert (told.get("enable_prefix_caching") is False) == mixed
    if mixed and cpu:
        with pytest.raises(EngineRefused, match=r"model.dtype=float32: .* set model.dtype=bfloat16"):
            engine_arguments(RolloutSection(), tmp_path, seed=0, dtype="float32")


def test_draft_as_long_as_trained_or_untrained_head_passes(tmp_path):
    check_policy(RolloutSection(num_speculative_tokens=3), policy(tmp_path, depth=3))
    check_policy(RolloutSection(num_speculative_tokens=5), policy(tmp_path))


def test_speculation_without_a_head_is_refused_and_plain_decoding_is_not(tmp_path):
    with pytest.raises(EngineRefused, match="no MTP head"):
        check_policy(RolloutSection(), policy(tmp_path, layers=0))
    check_policy(RolloutSection(speculation="none"), policy(tmp_path, layers=0))


def test_a_folder_that_is_no_policy_is_named(tmp_path):
    with pytest.raises(EngineRefused, match=r"no config\.json"):
        check_policy(RolloutSection(), tmp_path)


@pytest.mark.parametrize(("on_cpu", "v2"), [(True, False), (True, True), (False, False)])
def test_block_verification_is_refused_where_vllm_would_draft_greedily(on_cpu, v2):
    with pytest.raises(EngineRefused, match=r"rollout\.rule=block"):
        refuse_block(RolloutSection(rule="block"), on_cpu=on_cpu, v2_runner=v2)


def test_a_rule_that_vllm_does_not_serve_is_refused_by_name(tmp_path):
    rollout, path = RolloutSection(rule="lazy"), policy(tmp_path)
    with pytest.raises(EngineRefused, match=r"rollout\.rule: got lazy, but rollout\.engine=vllm serves only rejection"):
        engine_arguments(rollout, path, seed=0, dtype="float32")
    with pytest.raises(
        ValueError, match=r"rollout\.rule: got lazy with rollout\.engine=vllm.*set rollout\.engine=torch"
    ):
        ENGINES["vllm"].check_section(rollout, "rollout.engine", "vllm")


def test_block_verification_passes_on_the_runner_that_has_it():
    refuse_block(RolloutSection(rule="block"), on_cpu=False, v2_runner=True)


def test_temperature_and_limits_reach_the_engine():
    values = sampling_values(Sampling(temperature=0.7, top_k=5, max_tokens=9, seed=3))
    assert (values["temperature"], values["top_k"], values["max_tokens"], values["seed"]) == (0.7, 5, 9, 3)
    assert values["logprobs"] == 0


def test_tokens_carry_the_version_that_sampled_them():
    assert stamp(3, [], 0) == (0, 0, 0)
    assert stamp(5, [(2, 0)], 1) == (0, 0, 1, 1, 1)
    assert stamp(5, [(2, 0), (4, 1)], 2) == (0, 0, 1, 1, 2)
    assert stamp(4, [(0, 0), (0, 1)], 7) == (7, 7, 7, 7)


def test_a_users_own_variable_is_left_alone(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert "VLLM_LOGGING_LEVEL" not in missing(GENERAL | cpu_environment())


def test_environment_is_restored_after_the_start(monkeypatch):
    monkeypatch.delenv("BEBOP_TEST_A", raising=False)
    monkeypatch.setenv("BEBOP_TEST_B", "before")
    with pytest.raises(RuntimeError), applied({"BEBOP_TEST_A": "1", "BEBOP_TEST_B": "2"}):
        assert (os.environ["BEBOP_TEST_A"], os.environ["BEBOP_TEST_B"]) == ("1", "2")
        raise RuntimeError
    assert "BEBOP_TEST_A" not in os.environ
    assert os.environ["BEBOP_TEST_B"] == "before"


def test_the_engines_own_error_is_found_in_its_log(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text(
        "(EngineCore pid=1) ERROR 11-30 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=1) ERROR 11-30 [core.py:1]   File x\n"
        "(EngineCore pid=1) ERROR 11-30 [core.py:1] RuntimeError: probability tensor holds nan\n"
        "(EngineCore pid=1) INFO bye\n"
    )
    assert last_error(log) == "RuntimeError: probability tensor holds nan"
    assert last_error(tmp_path / "none.log") is None


class Fused(nn.Module):
    """Names and layout of a vLLM decoder layer: two query heads, one key-value head, width 2."""

    def __init__(self):
        super().__init__()
        self.config = type("C", (), {"num_hidden_layers": 1, "vocab_size": 3, "tie_word_embeddings": False})()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(8, 4)  # vocabulary padded to 8
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.qkv_proj = nn.Linear(4, 8)
        for key, value in (("head_size", 2), ("num_heads", 2), ("num_kv_heads", 1)):
            setattr(layer.self_attn.qkv_proj, key, value)
        layer.mlp = nn.Module()
        layer.mlp.gate_up_proj = nn.Linear(4, 6, bias=False)
        wrapped = nn.Module()
        wrapped.mtp_block = nn.Module()
        wrapped.mtp_block.input_layernorm = nn.Linear(4, 1, bias=False)
        self.model.layers = nn.ModuleList([layer])
        self.model.mtp_layers = nn.ModuleDict({"1": wrapped})


def test_fused_padded_and_renamed_parameters_are_seen_under_checkpoint_names():
    model = Fused()
    views = named_views(model)
    shapes = {name: list(view.shape) for name, view in views.items()}
    attention = "model.layers.0.self_attn."
    assert shapes == {
        "model.embed_tokens.weight": [3, 4],
        f"{attention}q_proj.weight": [4, 4],
        f"{attention}k_proj.weight": [2, 4],
        f"{attention}v_proj.weight": [2, 4],
        f"{attention}q_proj.bias": [4],
        f"{attention}k_proj.bias": [2],
        f"{attention}v_proj.bias": [2],
        "model.layers.0.mlp.gate_proj.weight": [3, 4],
        "model.layers.0.mlp.up_proj.weight": [3, 4],
        "model.mtp_layers.0.input_layernorm.weight": [1, 4],
    }
    replace_tensors(views, {f"{attention}k_proj.weight": torch.full((2, 4), 7.0)})
    fused = model.model.layers[0].self_attn.qkv_proj.weight
    assert (fused[4:6] == 7).all()
    assert not (fused[:4] == 7).any()


def test_a_packed_parameter_is_an_error_that_names_the_switch():
    model = Fused()
    model.model.layers[0].mlp.gate_up_proj.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(ValueError, match=r"gate_up_proj\.weight is packed.*BEBOP_KEEP_PLAIN_WEIGHTS"):
        named_views(model)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.mtp_layers.0.nothing": torch.zeros(1)}, "0 of 1 head tensors can be loaded: the engine holds 1"),
        ({"model.embed_tokens.weight": torch.zeros(8, 4)}, r"embed_tokens.weight has shape \[8, 4\].*\[3, 4\]"),
        ({"model.other": torch.zeros(1)}, "model.other: the engine holds no tensor"),
        ({"model.embed_tokens.weight": torch.full((3, 4), torch.nan)}, "not finite"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_whole(tensors, message):
    model = Fused()
    before = {name: view.clone() for name, view in named_views(model).items()}
    good = {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=message):
        replace_tensors(named_views(model), good | tensors)
    assert all(torch.equal(before[name], view) for name, view in named_views(model).items())


@pytest.mark.parametrize(
    ("engine", "asked", "able"),
    [("torch", {"draft_schedule": {"1+": 2}}, "vllm"), ("vllm", {"tree": "rheo"}, "torch")],
)
def test_an_engine_refuses_what_it_does_not_serve(engine, asked, able):
    section = RolloutSection(engine=engine, **asked)
    with pytest.raises(ValueError, match=rf"{next(iter(asked))}: got .*set rollout.engine={able}"):
        ENGINES[engine].check_section(section, "rollout.engine", engine)
