"""One request of the torch engine: what it may ask for, what it takes of a verified run; what a config may ask for."""

import json
import math

import numpy as np
import pytest
import torch

from bebop.config import RolloutSection, check
from bebop.engines import check_policy
from bebop.engines.torch_engine.request import make_request
from bebop.errors import BadInput, ConfigError, EngineRefused
from bebop.policies import random_checkpoint
from bebop.records import DraftCounts, Sampling


def request(prompt=(1, 2), **sampling):
    return make_request(
        "r", prompt, Sampling(**sampling), seed=3, vocabulary=30, max_model_len=16, end_ids=frozenset({0})
    )


def test_all_lists_are_cut_after_the_first_stop_token():
    stop = 12
    one = request(max_tokens=5, stop_token_ids=(stop,), ignore_eos=True)
    assert one.take([10, 11, stop, 20, 21, 22], [-0.1 * i for i in range(6)], version=4) == "stop"
    rollout = one.rollout("stop", speculating=False)
    assert rollout.token_ids == (10, 11, stop)
    assert rollout.logprobs == (0.0, -0.1, -0.2)
    assert rollout.versions == (4, 4, 4)
    assert rollout.counts is None


def test_tokens_stop_at_the_limit_and_carry_their_version():
    one = request(max_tokens=5)
    assert one.take([10, 11], [-1.0, -2.0], version=0) is None
    assert one.take([12, 13, 14, 15], [-3.0] * 4, version=1) == "length"
    assert (one.tokens, one.versions) == ([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])


def test_response_ends_at_model_length_or_end_of_text():
    assert request(prompt=(1,) * 10, max_tokens=100).limit == 6
    assert request().take([5, 0, 6], [0.0] * 3, version=0) == "stop"
    assert request(ignore_eos=True).take([5, 0, 6], [0.0] * 3, version=0) is None


def test_drafts_are_counted_by_depth():
    one = request()
    for accepted in (3, 0, 1):
        one.count(3, accepted, depth=3)
    assert one.counts() == DraftCounts(3, 9, (2, 1, 1))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "got 0 tokens"),
        ((1,) * 16, r"got 16 tokens, expected fewer than rollout\.max_model_len=16"),
        ((1, 30), r"got token 30, expected ids in \[0, 30\)"),
        ((1.7,), r"got \(1\.7,\), expected a sequence of token ids"),
        (("a",), "expected a sequence of token ids"),
        (5, "got 5, expected a sequence of token ids"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(prompt, message):
    with pytest.raises(EngineRefused, match=f"^prompt: .*{message}"):
        request(prompt)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("temperature", [-1.0, math.nan, 1e39, 10**400, None, "1", True], "a number at least 0, finite in float32"),
        ("top_p", [0.0, 1.5, 1e-46, torch.ones(2, 2)], r"a number in \(0, 1\], above 0 in float32"),
        ("top_k", [-1, 2.0, None, True], "an integer, at least 1, or 0 for off"),
        ("max_tokens", [0, None, 1.5], "an integer, at least 1"),
        ("seed", [2**63, "a", 1.5], "a signed 64-bit integer, or None"),
        ("stop_token_ids", [None, 5, [1], (1.5,)], "a tuple of token ids"),
        ("logprobs", [0, None, "no"], "True or False"),
        ("ignore_eos", [1], "True or False"),
    ],
)
def test_sampling_names_the_parameter_that_cannot_be_sampled(name, values, expected):
    for value in values:
        with pytest.raises(BadInput, match=rf"^sampling parameter {name}=.*: expected {expected}$") as caught:
            Sampling(**{name: value})
        assert "\n" not in str(caught.value)


def test_settings_are_float32_and_full_top_k_is_off():
    one = request(temperature=1e-46, top_p=0.7)
    assert (one.temperature, one.top_p) == (0.0, torch.tensor(0.7).item())
    assert [request(top_k=k).top_k for k in (0, 29, 30, 2**63)] == [0, 29, 0, 0]


def test_integers_of_any_type_are_integers():
    one = request(torch.tensor([1, 2]), top_k=np.int32(3), stop_token_ids=(np.int64(4),))
    assert (one.prompt, one.top_k, one.stops) == ((1, 2), 3, {0, 4})


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"tree": "rheo"}, ["rollout.tree: got rheo", "rollout.engine=vllm", "set rollout.engine=torch"]),
        ({"tree": "topk", "engine": "torch", "rule": "block"}, ["rollout.tree: got topk", "rollout.rule=block"]),
        (
            {"tree": "topk", "engine": "torch", "speculation": "none"},
            ["rollout.tree: got topk", "rollout.speculation=none"],
        ),
    ],
)
def test_a_tree_that_would_be_ignored_is_refused(keys, parts):
    model, data = {"name": "tiny"}, {"tasks": [{"name": "chain_sum"}]}
    values = {"model": model, "data": data, "rollout": keys}
    with pytest.raises(ConfigError) as caught:
        check("eval", values)
    assert all(part in str(caught.value) for part in parts)


def test_the_fixes_of_vllm_are_not_asked_of_another_engine():
    with pytest.raises(ConfigError, match=r"doctor\.engine_fixes: got false with doctor\.engine=torch"):
        check("doctor", {"doctor": {"engine": "torch", "engine_fixes": False}})


def test_tree_deeper_than_the_trained_head_is_allowed_and_logged(tmp_path, caplog):
    random_checkpoint(tmp_path, vocab=8)
    (tmp_path / "bebop.json").write_text(json.dumps({"mtp_depth": 3}))
    with caplog.at_level("INFO", "bebop.engines"):
        check_policy(RolloutSection(engine="torch", tree="rheo", tree_depth=8), tmp_path)
    assert "rollout.tree_depth=8" in caplog.text and "3" in caplog.text
