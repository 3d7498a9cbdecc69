"""The model card: what it says of the heads, and what it leaves of a policy's own card."""

import json
import re
import shlex

import pytest
import yaml

from bebop.config import Loss
from bebop.sft.lr import loss_at, resolve_warmup
from bebop.sft.model_card import BEGIN, END, TAGS, merge, write_card

CONFIG = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}
SCORED = {
    "alpha": [0.9, 0.8, 0.7],
    "acceptance_length": 3.2,
    "acceptance_length_se": 0.01,
    "acceptance_length_target_only": 3.0,
    "acceptance_length_target_only_se": 0.02,
    "num_anchors": 500,
}
MADE = {
    "config": {
        "sft": {
            "optimizer": "muon",
            "lr": 2e-3,
            "lr_schedule": "cosine",
            "batch_tokens": 4096,
            "grad_accum": 1,
            "num_processes": 2,
        },
        "data": {"tasks": [{"name": "chain_sum"}, {"name": "open"}], "path": None},
        "loss": {"warmup_share": 0.3},
    },
    "data": {"sampled_by_policy": True, "num_train": 768, "num_heldout": 64},
    "loss": "e2e_tv",
    "loss_warmup": "lk",
    "regression_steps": 40,
    "heads_from": "fresh, last_layer",
    "mtp_depth": 3,
    "steps": 160,
    "seed": 0,
    "temperature": 0.7,
    "entropy_nats": 0.05,
    "entropy_range": [0.01, 0.2],
    "tasks": {"chain_sum": SCORED, "open": {**SCORED, "acceptance_length": 2.1}},
    "all_tasks": SCORED,
}


def _front(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_model_card_describes_training_and_acceptance():
    card = re.sub(" +", " ", merge(None, MADE, CONFIG))
    assert _front(card)["library_name"] == "transformers" and set(TAGS) <= set(_front(card)["tags"])
    for said in (
        "`e2e_tv`, after `lk` for the first 30% of the steps",
        "| steps | 40 of hidden-state regression, then 160, muon, learning rate 0.002 cosine, 8192 tokens a step",
        "768 responses to prompts of chain_sum, open, sampled by this policy",
        "| temperature | 0.7,",
        "| chain_sum | 0.900 | 0.800 | 0.700 | 3.200 ± 0.010 | 3.000 ± 0.020 | 500 |",
        "| open | 0.900 | 0.800 | 0.700 | 2.100 ± 0.010 |",
        "rejection sampling | target-only",
    ):
        assert said in card, said
    assert "biased" not in card


def test_policys_own_card_stays_and_retraining_replaces_its_section():
    own = "---\nlicense: apache-2.0\ntags: [math]\n---\n# Owl\n\nA policy.\n"
    once = merge(own, MADE, CONFIG)
    assert _front(once) == {
        "license": "apache-2.0",
        "tags": ["math", *TAGS],
        "pipeline_tag": "text-generation",
    }
    assert "# Owl\n\nA policy.\n" in once
    twice = merge(
        once.replace("A policy.", "A policy.") + "\nAfterword.\n", {**MADE, "loss": "tv", "loss_warmup": None}, CONFIG
    )
    assert twice.count(BEGIN) == twice.count(END) == 1 and "`tv`" in twice and "`e2e_tv`" not in twice
    assert "A policy." in twice and twice.endswith("\nAfterword.\n")
    assert merge(twice, MADE, CONFIG).count("speculative-decoding\n") == 1


def test_given_text_is_said_to_bias_the_length(tmp_path):
    given = {**MADE, "data": {**MADE["data"], "sampled_by_policy": False}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_card(tmp_path, given)
    assert "biased" in (tmp_path / "README.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json"]


@pytest.mark.parametrize(
    ("config", "anywhere"),
    [
        (CONFIG, True),
        ({"model_type": "qwen3", "architectures": ["MiMoForCausalLM"]}, True),
        ({"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}, True),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, False),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, False),
        ({"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}, False),
    ],
)
def test_a_card_says_which_vllm_serves_the_directory_and_how(config, anywhere):
    card = merge(None, MADE, config)
    assert ("Any vLLM serves" in card) == anywhere and ("vLLM with bebop installed serves" in card) != anywhere
    (line,) = [line for line in card.splitlines() if line.startswith("vllm serve ")]
    words = shlex.split(line)
    assert words[:4] == ["vllm", "serve", ".", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "mtp",
        "num_speculative_tokens": MADE["mtp_depth"],
        "draft_sample_method": "probabilistic",
    }


def test_bytes_that_are_no_text_stay_as_they_were(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "README.md").write_bytes(b"---\nauthor: Jos\xe9\n---\ncaf\xe9 \xff\n")
    write_card(tmp_path, MADE)
    card = (tmp_path / "README.md").read_bytes()
    assert b"author: Jos\xe9" in card and b"caf\xe9 \xff\n" in card and b"MTP heads" in card


def test_evaluation_results_of_the_policys_card_stay(tmp_path):
    own = "---\nmodel-index:\n- name: owl\n  results:\n  - task: {type: x}\n    odd: [1]\n---\n# Owl\n"
    results = _front(merge(own, MADE, CONFIG))["model-index"]
    assert results == [{"name": "owl", "results": [{"task": {"type": "x"}, "odd": [1]}]}]


@pytest.mark.parametrize("front", ["- a", "title: My model: the best", "My model"])
def test_front_matter_that_is_no_mapping_costs_no_training(front):
    """The card is the last thing that a run writes."""
    odd = f"---\n{front}\n---\n# Mine\n"
    made = merge(odd, MADE, CONFIG)
    assert odd in made and made.startswith("---\n") and "speculative-decoding" in made
    assert merge(made, MADE, CONFIG) == made


@pytest.mark.parametrize(
    ("name", "cold", "warmup"),
    [("e2e_tv", True, "lk"), ("tv", True, "lk"), ("e2e_tv", False, None), ("hard_ce", True, None), ("kl", False, None)],
)
def test_tv_losses_warm_up_on_cold_heads_alone(name, cold, warmup):
    loss = resolve_warmup(Loss(name=name), cold=cold)
    assert loss.warmup == warmup
    assert loss_at(0, 10, loss) == (warmup or name)
    assert resolve_warmup(Loss(name=name, warmup="kl"), cold=cold).warmup == "kl"
    with pytest.raises(ValueError, match=r"loss\.warmup: got auto"):
        loss_at(0, 10, Loss(name=name))
