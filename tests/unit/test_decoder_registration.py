"""Which policies bebop's classes serve in vLLM, by config alone. The classes themselves run in tests/e2e."""

from __future__ import annotations

import pickle

import pytest
from transformers import AutoConfig

from bebop.engines.vllm_engine import registration
from bebop.engines.vllm_engine.registration import DRAFTER, has_heads, hf_config_override
from bebop.mtp.families import DECODER


def config(model_type: str, architecture: str, layers: int | None = 1):
    claim = {} if layers is None else {"num_nextn_predict_layers": layers}
    return AutoConfig.for_model(model_type, architectures=[architecture], **claim)


@pytest.mark.parametrize(("model_type", "name"), DECODER.classes.items())
def test_policies_with_heads_of_the_family_get_its_drafter(model_type, name):
    drafts = hf_config_override(config(model_type, f"{name}ForCausalLM"))
    assert (drafts.model_type, drafts.architectures, drafts.n_predict) == ("mtp", [DRAFTER], 1)
    again = pickle.loads(pickle.dumps(drafts))
    assert has_heads(again) and type(again).model_type == model_type
    assert pickle.loads(pickle.dumps(hf_config_override)) is hf_config_override


@pytest.mark.parametrize(
    ("model_type", "architecture", "layers"),
    [
        ("llama", "LlamaForCausalLM", None),
        ("llama", "LlamaForCausalLM", 0),
        ("qwen2", "Qwen2ForCausalLM", None),
        ("qwen3", "MiMoForCausalLM", 1),
        ("deepseek_v3", "DeepseekV3ForCausalLM", 1),
    ],
)
def test_every_other_policy_is_left_to_vllm(monkeypatch, model_type, architecture, layers):
    asked = config(model_type, architecture, layers)
    monkeypatch.setattr(registration.hf_config_override, "stock", lambda given: ("stock", given), raising=False)
    assert not has_heads(asked)
    assert hf_config_override(asked) == ("stock", asked)
