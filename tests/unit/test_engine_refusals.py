"""What an engine refuses before anything starts, and the small pure parts around it."""

import json
import os

import pytest
import torch

from bebop.config import RolloutSection
from bebop.engines import ENGINES, check_policy
from bebop.engines.vllm_engine.arguments import (
    engine_arguments,
    refuse_block,
    sampling_values,
    stamp,
)
from bebop.engines.vllm_engine.environment import GENERAL, applied, cpu_environment, last_error, missing
from bebop.engines.weights import replace_tensors
from bebop.errors import ConfigError, EngineRefused
from bebop.policies import random_checkpoint
from bebop.records import Sampling


def policy(path, depth=None, layers=1):
    random_checkpoint(path, vocab=8, mtp=bool(layers))
    (path / "bebop.json").write_text(json.dumps({} if depth is None else {"mtp_depth": depth}))
    return path


def test_draft_longer_than_the_trained_head_names_both_keys(tmp_path):
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
def test_hybrids_run_without_prefix_cache_in_bfloat16_on_cpu(tmp_path, monkeypatch, config, mixed, cpu):
    monkeypatch.setattr("bebop.engines.vllm_engine.fixes.on_cpu", lambda: cpu)
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = engine_arguments(RolloutSection(), tmp_path, seed=0, dtype="bfloat16")
    assert (told.get("enable_prefix_caching") is False) == mixed
    if mixed and cpu:
        with pytest.raises(EngineRefused, match=r"model.dtype: got float32.* set model.dtype=bfloat16"):
            engine_arguments(RolloutSection(), tmp_path, seed=0, dtype="float32")


def test_draft_as_long_as_trained_or_untrained_head_passes(tmp_path):
    check_policy(RolloutSection(num_speculative_tokens=3), policy(tmp_path, depth=3))
    check_policy(RolloutSection(num_speculative_tokens=5), policy(tmp_path))


def test_only_speculation_needs_a_head(tmp_path):
    with pytest.raises(EngineRefused, match="no MTP head"):
        check_policy(RolloutSection(), policy(tmp_path, layers=0))
    check_policy(RolloutSection(speculation="none"), policy(tmp_path, layers=0))


def test_a_folder_that_is_no_policy_is_named(tmp_path):
    with pytest.raises(EngineRefused, match=r"no config\.json"):
        check_policy(RolloutSection(), tmp_path)


@pytest.mark.parametrize(("on_cpu", "v2"), [(True, False), (True, True), (False, False)])
def test_block_verification_is_refused_where_vllm_would_draft_greedily(on_cpu, v2):
    with pytest.raises(EngineRefused, match=r"rollout\.rule: got block"):
        refuse_block(RolloutSection(rule="block"), on_cpu=on_cpu, v2_runner=v2)


def test_rule_unsupported_by_vllm_is_refused_by_name(tmp_path):
    rollout, path = RolloutSection(rule="lazy"), policy(tmp_path)
    with pytest.raises(EngineRefused, match=r"rollout\.rule: got lazy, but rollout\.engine=vllm.* rejection"):
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


HELD = {
    "model.embed_tokens.weight": torch.ones(3, 4),
    "model.layers.0.mlp.up_proj.weight": torch.ones(3, 4),
    "model.mtp_layers.0.input_layernorm.weight": torch.ones(4),
}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.mtp_layers.0.nothing": torch.zeros(1)}, "heads: got 1 tensors, of which the engine has 0"),
        ({"model.embed_tokens.weight": torch.zeros(8, 4)}, r"embed_tokens.weight: got shape \[8, 4\].*\[3, 4\]"),
        ({"model.other": torch.zeros(1)}, "model.other: the engine has no tensor"),
        ({"model.embed_tokens.weight": torch.full((3, 4), torch.nan)}, "embed_tokens.weight: got a NaN"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_whole(tensors, message):
    def is_head(name: str) -> bool:
        return name.startswith("model.mtp_layers.")

    views = {name: tensor.clone() for name, tensor in HELD.items()}
    good = {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=message):
        replace_tensors(views, good | tensors, is_head=is_head)
    assert all(torch.equal(HELD[name], view) for name, view in views.items())
    replace_tensors(views, good, is_head=is_head)
    assert (views["model.layers.0.mlp.up_proj.weight"] == 0).all()


@pytest.mark.parametrize(
    ("engine", "asked", "able"),
    [("torch", {"draft_schedule": {"1+": 2}}, "vllm"), ("vllm", {"tree": "rheo"}, "torch")],
)
def test_an_engine_refuses_what_it_does_not_serve(engine, asked, able):
    section = RolloutSection(engine=engine, **asked)
    with pytest.raises(ValueError, match=rf"{next(iter(asked))}: got .*set rollout.engine={able}"):
        ENGINES[engine].check_section(section, "rollout.engine", engine)
