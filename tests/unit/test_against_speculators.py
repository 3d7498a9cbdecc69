"""recipes/against_speculators: its own code; tests of speculators' own computation run if the package is installed."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from bebop.acceptance import score_batches, summarise
from bebop.backbone import load_backbone
from bebop.backbone.hidden_states import HiddenStates
from bebop.config import Model
from bebop.data.batches import pack_rows
from bebop.data.self_distill import TextRow
from bebop.data.tokenizer import write_tiny_tokenizer
from bebop.errors import ConfigError
from bebop.mtp import draft_hidden, load_heads
from bebop.policies.random_family import family_config, write_random_family

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "against_speculators"))
import baseline
from documents import Pooled, by_document
from shared_policy import shared_policy

DEPTH, VOCAB = 3, 61
INSTALLED = importlib.util.find_spec(baseline.PACKAGE) is not None


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen")
    config = family_config(
        "qwen3_5_text",
        vocab_size=write_tiny_tokenizer(directory),
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        intermediate_size=96,
        end_id=1,
        pad_id=0,
    )
    write_random_family(directory, config, 3, mtp=True)
    return directory


@pytest.fixture(scope="module")
def text(policy):
    """The backbone, indexed batches and the same with hidden states; documents of several lengths in a batch."""
    backbone = load_backbone(policy, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (20, 31, 12, 40, 9):
        ids = torch.randint(0, VOCAB, (5 + length,), generator=generator).tolist()
        rows.append(TextRow("a", "t", tuple(ids[:5]), tuple(ids[5:]), (1,) * length))
    indexed = pack_rows(rows, range(len(rows)), 80, DEPTH)
    hidden = HiddenStates(backbone, rows, 80, name="text")
    return backbone, indexed, [hidden.batch(each) for each in indexed]


def test_documents_pool_to_the_acceptance_that_training_reports(policy, text):
    backbone, _, batches = text
    weights = (backbone.embed_weight, backbone.lm_head_weight)
    head = load_heads(policy)
    scores = score_batches(head, batches, *weights, temperature=0.8)
    ours, reported = by_document(scores), summarise(scores)
    assert len(ours.length.count) == 5 and ours.length.count.sum() == reported.num_anchors
    assert ours.length.value == pytest.approx(reported.acceptance_length, abs=1e-6)
    assert [each.value for each in ours.accepted] == pytest.approx(reported.accepted, abs=1e-6)
    assert ours.length.error == pytest.approx(reported.acceptance_length_se, rel=1e-9)


def test_a_gain_is_paired_by_document():
    count = torch.tensor([10.0, 30.0, 20.0, 5.0], dtype=torch.float64)
    mean = torch.tensor([1.0, 3.0, 2.0, 1.5], dtype=torch.float64)
    low, high = Pooled(mean * count, count), Pooled((mean + 0.25) * count, count)
    gain, error = high.gain(low)
    assert gain == pytest.approx(0.25) and error == pytest.approx(0, abs=1e-12)
    assert low.error > 0.1  # the documents differ far more than the heads do


def test_error_of_equal_documents_is_that_of_a_mean():
    values = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    pooled = Pooled(values * 7, torch.full((4,), 7.0, dtype=torch.float64))
    assert pooled.error == pytest.approx(values.std().item() / math.sqrt(4))


def test_samples_keep_documents_and_supervision_apart(text):
    _, indexed, batches = text
    one = baseline.sample(indexed[0], batches[0])
    starts = (one["position_ids"][0] == 0).nonzero().squeeze(1)
    assert starts.tolist() == batches[0].cu_seqlens[:-1].tolist()
    assert one["document_ids"][0].diff().nonzero().squeeze(1).add(1).tolist() == starts[1:].tolist()
    assert all(one["loss_mask"][0, start : start + 5].sum() == 0 for start in starts)


def test_wrong_package_version_is_refused_with_the_right_one(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.8.0")
    with pytest.raises(ConfigError, match=r"got version 0\.8\.0, expected 0\.9\.0.*bench-speculators\.in"):
        baseline.require()


def test_a_policy_that_only_one_side_trains_is_refused(tmp_path):
    config = family_config(
        "glm4_moe",
        vocab_size=write_tiny_tokenizer(tmp_path),
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        intermediate_size=96,
        end_id=1,
        pad_id=0,
    )
    write_random_family(tmp_path, config, 3, mtp=True)
    with pytest.raises(ConfigError, match="expected a policy of qwen3_next or qwen3_5"):
        shared_policy(Model(name="hf", path=tmp_path), 0)


@pytest.mark.skipif(not INSTALLED, reason="speculators is not installed; requirements/bench-speculators.in")
def test_first_depth_of_both_sides_is_the_same_computation(policy, text):
    backbone, indexed, batches = text
    model = baseline.load(policy, DEPTH)
    for one, batch in zip(indexed, batches, strict=True):
        packed = (batch.input_ids, batch.cu_seqlens, batch.position_ids)
        ours = draft_hidden(load_heads(policy), batch.hidden, backbone.embed_weight, *packed, DEPTH)
        theirs = baseline.hidden(model, baseline.sample(one, batch))[0]
        inside = batch.anchors[batch.anchors < len(theirs)]  # elsewhere the next document's token is read
        torch.testing.assert_close(ours[0, inside], theirs[inside], rtol=0, atol=1e-4)


@pytest.mark.skipif(not INSTALLED, reason="speculators is not installed; requirements/bench-speculators.in")
def test_trained_heads_come_back_under_their_names(policy, text, tmp_path):
    _, indexed, batches = text
    samples = [baseline.sample(one, batch) for one, batch in zip(indexed, batches, strict=True)]
    trained = baseline.train(policy, samples, DEPTH, baseline.Options(optimizer="adamw"), 0, tmp_path / "out")
    before, after = (dict(load_heads(each).named_parameters()) for each in (policy, trained))
    assert before.keys() == after.keys()
    assert all(0 < (before[name] - after[name]).abs().max() < 0.1 for name in before)
