"""One request of the torch engine: what it may ask for, what it takes of a verified run; what a config may ask for."""

import json

import pytest
import torch

from bebop.config import check
from bebop.config.sections import RolloutSection
from bebop.engines import check_policy
from bebop.engines.torch_engine.request import end_of_text, make_request
from bebop.errors import ConfigError, EngineRefused
from bebop.records import DraftCounts, Sampling


def request(prompt=(1, 2), sampling=None, **extra):
    return make_request(
        "r",
        prompt,
        sampling or Sampling(),
        seed=3,
        extra=extra,
        vocabulary=30,
        max_model_len=16,
        end_ids=frozenset({0}),
    )


def test_a_run_is_cut_behind_its_first_stop_token_in_all_lists_alike():
    stop = 12
    one = request(sampling=Sampling(max_tokens=5, stop_token_ids=(stop,), ignore_eos=True))
    assert one.take([10, 11, stop, 20, 21, 22], [-0.1 * i for i in range(6)], version=4) == "stop"
    rollout = one.rollout("stop", speculating=False)
    assert rollout.token_ids == (10, 11, stop)
    assert rollout.logprobs == (0.0, -0.1, -0.2)
    assert rollout.versions == (4, 4, 4)
    assert rollout.counts is None


def test_a_run_is_cut_at_the_limit_and_tokens_carry_the_version_of_their_round():
    one = request(sampling=Sampling(max_tokens=5))
    assert one.take([10, 11], [-1.0, -2.0], version=0) is None
    assert one.take([12, 13, 14, 15], [-3.0] * 4, version=1) == "length"
    assert (one.tokens, one.versions) == ([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])


def test_the_response_ends_at_the_models_length_and_the_end_of_text_stops_unless_ignored():
    assert request(prompt=(1,) * 10, sampling=Sampling(max_tokens=100)).limit == 6
    assert request().take([5, 0, 6], [0.0] * 3, version=0) == "stop"
    assert request(sampling=Sampling(ignore_eos=True)).take([5, 0, 6], [0.0] * 3, version=0) is None


def test_drafts_are_counted_by_depth():
    one = request()
    for accepted in (3, 0, 1):
        one.count(3, accepted, depth=3)
    assert one.counts() == DraftCounts(3, 9, (2, 1, 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {1: 2.0}), ("repetition_penalty", 1.2), ("n", 2), ("min_tokens", 4), ("bad_words", ["x"])],
)
def test_a_sampling_parameter_that_would_be_ignored_is_refused_by_name(name, value):
    with pytest.raises(EngineRefused, match=rf"sampling parameter {name}=.*rollout\.engine=torch"):
        request(**{name: value})


def test_parameters_that_ask_for_nothing_pass_and_those_it_has_arrive():
    one = request(sampling=Sampling(top_k=-1, seed=8), min_p=0.25, repetition_penalty=1.0, n=1, logit_bias=None)
    assert (one.top_k, one.min_p, one.seed) == (0, 0.25, 8)
    assert request(temperature=0.5, top_p=0.9).temperature == 0.5
    assert request().seed == 3


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), Sampling(), "no token came"),
        ((1,) * 16, Sampling(), r"16 tokens came, expected fewer than rollout\.max_model_len=16"),
        ((1, 30), Sampling(), r"token 30 came, expected ids in \[0, 30\)"),
        ((1,), Sampling(temperature=-1.0), "temperature=-1.0: expected a number at least 0"),
        ((1,), Sampling(temperature=float("nan")), "temperature=nan"),
        ((1,), Sampling(top_p=0.0), "top_p=0.0"),
        ((1,), Sampling(max_tokens=0), "max_tokens=0"),
        ((1,), Sampling(seed=2**63), "seed=9223372036854775808"),
        ((1,), Sampling(temperature=1e39), r"temperature=1e\+39: expected a number at least 0, finite in float32"),
        ((1,), Sampling(temperature=10**400), "temperature=10+: expected a number"),
        ((1,), Sampling(top_p=1e-46), r"top_p=1e-46: expected a number in \(0, 1\], above 0 in float32"),
        ((1,), Sampling(top_k=-2), "top_k=-2: expected an integer"),
        ((1.7,), Sampling(), r"prompt: \(1\.7,\) came, expected a sequence of token ids"),
        (("a",), Sampling(), "prompt: .* came, expected a sequence of token ids"),
        (5, Sampling(), "prompt: 5 came, expected a sequence of token ids"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_one_line(prompt, sampling, message):
    with pytest.raises(EngineRefused, match=message):
        request(prompt=prompt, sampling=sampling)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1.5]),
        ("temperature", None),
        ("temperature", "1"),
        ("top_p", torch.ones(2, 2)),
        ("top_k", None),
        ("top_k", True),
        ("top_k", 2.0),
        ("max_tokens", None),
        ("seed", "a"),
        ("seed", 1.5),
        ("logprobs", -1),
        ("logprobs", "no"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_one_line(name, value):
    with pytest.raises(EngineRefused, match=rf"^sampling parameter {name}=.*: expected ") as caught:
        request(**{name: value})
    assert "\n" not in str(caught.value)


def test_values_are_those_of_float32_and_a_top_k_of_the_whole_vocabulary_is_off():
    one = request(temperature=1e-46, top_p=0.7, min_p=1e-46)
    assert (one.temperature, one.min_p) == (0.0, 0.0)
    assert one.top_p == torch.tensor(0.7).item()
    assert [request(top_k=k).top_k for k in (-1, 0, 29, 30, 2**63)] == [0, 0, 29, 0, 0]


def test_logprobs_are_counted_as_in_vllm_where_0_is_the_sampled_tokens_own():
    assert [request(logprobs=value).want_logprobs for value in (0, 1, True, False, None)] == [True] * 3 + [False] * 2


def test_integers_of_any_type_are_integers():
    import numpy as np

    one = request(prompt=torch.tensor([1, 2]), seed=np.int64(8), top_k=np.int32(3), stop_token_ids=np.array([4]))
    assert (one.prompt, one.seed, one.top_k, one.stops) == ((1, 2), 8, 3, {0, 4})


def test_ends_of_text_come_from_both_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert end_of_text(tmp_path) == {5, 9}


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"tree": "rheo"}, ["rollout.tree=rheo", "rollout.engine=vllm", "set rollout.engine=torch"]),
        ({"tree": "topk", "engine": "torch", "rule": "block"}, ["rollout.tree=topk", "rollout.rule=block"]),
        ({"tree": "topk", "engine": "torch", "speculation": "none"}, ["rollout.tree=topk", "rollout.speculation=none"]),
    ],
)
def test_a_tree_that_would_be_ignored_is_refused(keys, parts):
    model, data = {"name": "tiny"}, {"tasks": [{"name": "chain_sum"}]}
    values = {"model": model, "data": data, "rollout": keys}
    with pytest.raises(ConfigError) as caught:
        check("eval", values)
    assert all(part in str(caught.value) for part in parts)


def test_the_fixes_of_vllm_are_not_asked_of_another_engine():
    with pytest.raises(ConfigError, match=r"doctor\.engine_fixes=false with doctor\.engine=torch"):
        check("doctor", {"doctor": {"engine": "torch", "engine_fixes": False}})


def test_a_tree_deeper_than_the_head_was_trained_is_allowed_and_said(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    (tmp_path / "bebop.json").write_text(json.dumps({"mtp_depth": 3}))
    with caplog.at_level("INFO", "bebop.engines"):
        check_policy(RolloutSection(engine="torch", tree="rheo", tree_depth=8), tmp_path)
    assert "rollout.tree_depth=8" in caplog.text and "3" in caplog.text
