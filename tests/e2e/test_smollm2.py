"""SmolLM2 out of its package, in the MiMo layout: the original's logits and the original's tokens."""

from __future__ import annotations

import json

import pytest
import torch

from bebop.backbone import load_backbone
from bebop.config import Model
from bebop.data.tokenizer import encode_prompt, load_tokenizer
from bebop.policies import prepare_policy
from bebop.policies.smollm2 import find_smollm2, load_smollm2
from bebop.records import Prompt

TEXTS = (
    "What is 12 + 3456?",
    "Hello  world 1234\n\n  héllo ✓ \ttab 日本",
    "a  5 6\r\n é e\u0301 3.14  \n<|im_start|>user\nit's<|im_end|>\n",
    "   \n \n\n  x = [1, 22,333]\n",
)


@pytest.fixture(scope="module")
def original():
    return load_smollm2(find_smollm2())


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEBOP_HOME", str(tmp_path_factory.mktemp("home")))
        return prepare_policy(Model(name="smollm2", dtype="bfloat16"), 0)


@pytest.mark.e2e
def test_tokens_are_the_originals(policy, original):
    tokenizer = load_tokenizer(policy)
    for text in TEXTS:
        assert tokenizer.encode(text) == original[1].encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == json.loads((policy / "config.json").read_text())["eos_token_id"]
    prompt = Prompt(prompt_id="p", task="t", text="Hi")
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.e2e
def test_logits_are_the_originals_within_bfloat16_rounding(policy, original):
    """The mapping itself is exact: all of the difference is that of rounding the original's weights to bfloat16."""
    network, tokenizer = original
    backbone = load_backbone(policy, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(TEXTS[1] + TEXTS[2])])
    with torch.no_grad():
        exact, mapped = network(ids).logits, backbone.model(ids).logits
        for weight in network.parameters():  # not .to(bfloat16): that would round the rotary frequencies too
            weight.copy_(weight.bfloat16())
        rounded = network(ids).logits
    assert (mapped - rounded).abs().max() < 1e-3
    assert (mapped - exact).abs().mean() < 0.02 * exact.abs().mean()
