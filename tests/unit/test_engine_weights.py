"""Digests of weights as they pass, and the number that tells whether a drafter's parameters changed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from bebop.engines import weights
from bebop.engines.weights import Digests, Layout, fingerprint, sample
from bebop.mtp import checkpoint_checksums
from bebop.policies import random_checkpoint


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("policy"), vocab=8)


def noted(policy, tensors) -> Digests:
    digests = Digests(Layout(policy))
    for name, tensor in tensors.items():
        digests.note(name, tensor)
    return digests


def test_digests_in_any_order_are_the_checkpoints_checksums(policy):
    tensors = load_file(policy / "model.safetensors")
    backwards = dict(reversed(tensors.items()))
    assert noted(policy, tensors).checksums() == noted(policy, backwards).checksums() == checkpoint_checksums(policy)


def test_digest_samples_a_large_backbone_but_not_heads(policy, monkeypatch):
    monkeypatch.setattr(weights, "WHOLE_UP_TO", 1000)
    monkeypatch.setattr(weights, "SAMPLE", 64)
    tensors = load_file(policy / "model.safetensors")
    sums = noted(policy, tensors).checksums()
    assert sums.backbone.startswith("sampled-") and sums.heads == checkpoint_checksums(policy).heads
    assert noted(policy, tensors).checksums() == sums
    for name, same in (("model.embed_tokens.weight", "heads"), ("model.mtp_layers.0.input_proj.weight", "backbone")):
        moved = noted(policy, tensors | {name: tensors[name] + 1}).checksums()
        assert moved != sums and getattr(moved, same) == getattr(sums, same)


def test_a_sample_is_drawn_by_the_name():
    value = torch.arange(100_000.0)
    assert torch.equal(sample("a", value), sample("a", value))
    assert not torch.equal(sample("a", value), sample("b", value))
    assert torch.equal(sample("a", value[:50]), value[:50])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fingerprint_sees_any_bit_and_any_exchange(dtype, monkeypatch):
    monkeypatch.setattr(weights, "CHUNK", 7)
    one, two = torch.randn(4, 5).to(dtype), torch.randn(4, 5).to(dtype)
    before = fingerprint([one, two])
    assert fingerprint([one.clone(), two]) == before
    assert fingerprint([two, one]) != before
    for index in range(20):
        changed = one.clone().view(-1)
        changed[index] = torch.nextafter(changed[index], changed.new_tensor(9.0))
        assert fingerprint([changed.view(4, 5), two]) != before
    assert fingerprint([one.flip(0), two]) != before
