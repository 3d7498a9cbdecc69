"""The corrections to vLLM: what they compute, when they apply, what they refuse. vLLM itself runs in tests/e2e."""

from types import SimpleNamespace

import pytest
import torch

from bebop.engines.vllm_engine import fixes
from bebop.engines.vllm_engine.fixes import draft_rows, expand_batch_to_tokens, redraw_seeded, stats_of
from bebop.errors import PatchRefused


def test_expansion_repeats_each_value_for_its_own_tokens():
    x = torch.tensor([0.7, 1.3, 0.5])
    got = expand_batch_to_tokens(x, torch.tensor([2, 5, 6], dtype=torch.int32), 6)
    assert torch.equal(got, torch.tensor([0.7, 0.7, 1.3, 1.3, 1.3, 0.5]))


def test_expansion_keeps_fractions_and_dtype():
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        x = torch.tensor([0.7, 2.0], dtype=dtype)
        got = expand_batch_to_tokens(x, torch.tensor([1, 3]), 3)
        assert got.dtype == dtype
        assert torch.equal(got, torch.stack([x[0], x[1], x[1]]))


def test_expansion_replaces_greedy_temperature():
    got = expand_batch_to_tokens(torch.tensor([0.0, 0.7]), torch.tensor([2, 3]), 3, replace_from=0, replace_to=1)
    assert torch.equal(got, torch.tensor([1.0, 1.0, 0.7]))


def test_expansion_skips_requests_without_drafts():
    got = expand_batch_to_tokens(torch.tensor([3.0, 4.0, 5.0]), torch.tensor([0, 2, 2]), 2)
    assert torch.equal(got, torch.tensor([4.0, 4.0]))


def test_reversed_batch_keeps_each_requests_draft_distributions():
    q = torch.rand(3, 2, 5)
    got = draft_rows(q, ["a", "b", "c"], ["c", "b", "a"], [2, 1, 2])
    assert torch.equal(got, torch.cat([q[2], q[1, :1], q[0]]))
    assert torch.equal(draft_rows(q, ["a", "b", "c"], ["c", "a"], [0, 2]), q[0])
    assert draft_rows(q, ["a", "b", "c"], ["c", "a"], [0, 0]) is None


def test_request_without_a_draft_leaves_other_distributions_unchanged():
    q = torch.rand(2, 3, 5)
    got = draft_rows(q, ["a", "b"], ["b", "new", "a"], [3, 3, 2])
    assert torch.equal(got, torch.cat([q[1], torch.zeros(3, 5), q[0, :2]]))


def test_histogram_becomes_counts_per_depth():
    # 20 drafts of 3: 5 with none accepted, 7 with one, 5 with two, 3 with all
    counted = SimpleNamespace(histogram=[5, 7, 5, 3], num_draft_tokens=60)
    stats = stats_of(counted)
    assert stats.accepted_per_depth == (15, 8, 3)
    assert (stats.num_accepted_tokens, stats.num_verify_steps, stats.num_draft_tokens) == (26, 20, 60)


def test_seeded_drafts_follow_the_draft_distribution_and_their_generator():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    warm = torch.ones(2)

    def drawn(seed, num=1):
        generators, rows = {1: torch.Generator().manual_seed(seed)}, []
        for _ in range(num):
            tokens = torch.tensor([-7, -7])
            redraw_seeded(tokens, probs, generators, warm)
            rows.append(tokens.tolist())
        return rows

    assert drawn(3, 20) == drawn(3, 20) != drawn(4, 20)
    assert {row[0] for row in drawn(3, 20)} == {-7}  # without a generator: left alone
    share = torch.bincount(torch.tensor([row[1] for row in drawn(5, 20_000)]), minlength=3) / 20_000
    assert (share - probs[1]).abs().max() < 0.02
    greedy = torch.tensor([1, 2])
    redraw_seeded(greedy, probs, {0: torch.Generator()}, torch.tensor([0.0, 1.0]))
    assert greedy.tolist() == [1, 2]


def test_unknown_version_stops_bebop_with_both_versions_named():
    with pytest.raises(PatchRefused, match=r"9\.9\.9.*0\.31\.0"):
        fixes.require("9.9.9")
    fixes.require("0.31.0")


def test_unknown_version_is_left_alone_for_users_of_plain_vllm(monkeypatch, caplog):
    applied = []
    patch = fixes.Patch("toy", True, lambda: True, lambda: applied.append(1))
    monkeypatch.setattr(fixes, "PATCHES", (patch,))
    monkeypatch.setattr(fixes, "_status", {})
    monkeypatch.setattr(fixes, "installed_version", lambda: "9.9.9")
    status = fixes.apply_all()
    assert not applied
    assert status["toy"].startswith("refused: vllm 9.9.9")
    assert len(caplog.records) == 1


def test_each_patch_is_applied_once_and_only_where_wanted(monkeypatch):
    applied = []
    patches = (
        fixes.Patch("wanted", True, lambda: True, lambda: applied.append("wanted")),
        fixes.Patch("elsewhere", True, lambda: False, lambda: applied.append("elsewhere")),
    )
    monkeypatch.setattr(fixes, "PATCHES", patches)
    monkeypatch.setattr(fixes, "_status", {})
    monkeypatch.setattr(fixes, "installed_version", lambda: "0.31.0")
    fixes.apply_all()
    assert fixes.apply_all() == {"wanted": "applied", "elsewhere": "not needed"}
    assert applied == ["wanted"]


def test_patch_without_a_target_is_reported_not_raised(monkeypatch):
    def gone() -> None:
        raise AttributeError("module has no attribute expand_batch_to_tokens")

    monkeypatch.setattr(fixes, "PATCHES", (fixes.Patch("toy", True, lambda: True, gone),))
    monkeypatch.setattr(fixes, "_status", {})
    monkeypatch.setattr(fixes, "installed_version", lambda: "0.31.0")
    assert fixes.apply_all()["toy"].startswith("refused: module has no attribute")


def test_switch_leaves_vllm_as_it_came(monkeypatch):
    monkeypatch.setenv(fixes.FIXES_ENV, "0")
    assert set(fixes.apply_all().values()) == {"off"}
    fixes.require("9.9.9")
