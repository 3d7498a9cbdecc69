"""Decomposition and decision: what is entropy, what is mismatch, and when the monitor says nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bebop.monitor import MonitorState, decide, decompose, slope_of, split_by_definition
from bebop.records import DraftCounts, StepRecord

NUM_DRAFTS = 10_000


def counts_for(acceptance_length: float, depth: int = 3) -> DraftCounts:
    accepted = round((acceptance_length - 1) * NUM_DRAFTS)
    per_depth = [min(NUM_DRAFTS, max(0, accepted - i * NUM_DRAFTS)) for i in range(depth)]
    return DraftCounts(NUM_DRAFTS, NUM_DRAFTS * depth, tuple(per_depth))


def step(number: int, entropy: float | None, acceptance: float | None, k: int = 3, **fields) -> StepRecord:
    counts = None if acceptance is None else counts_for(acceptance, k)
    values = {"num_speculative_tokens": k, "acceptance_rule": "rejection", "temperature": 1.0, **fields}
    return StepRecord(number, entropy, counts, **values)


def run(num_steps: int = 40, mismatch: float = 0.0, noise: float = 0.01, seed: int = 0, drift: float = -0.1) -> list:
    """Entropy drifts from .5 nats, acceptance length falls by 1 per nat; from step 20 on `mismatch` is added."""
    rng = np.random.default_rng(seed)
    history = []
    for t in range(num_steps):
        entropy = 0.5 + drift * t / num_steps + 0.03 * rng.standard_normal()
        late = mismatch if t >= num_steps // 2 else 0.0
        history.append(step(t, entropy, 3.0 - (entropy - 0.5) + late + noise * rng.standard_normal()))
    return history


def test_entropy_alone_is_no_mismatch_and_no_update():
    decision = decide(MonitorState(run()))
    assert decision.update is False and decision.word == "keep the heads"
    assert decision.evidence["mismatch_low"] > -0.05
    assert decision.evidence["slope"] == pytest.approx(-1, abs=0.2)
    assert decision.evidence["counts"]["num_drafts"] == 40 * NUM_DRAFTS


def test_significant_mismatch_asks_for_an_update():
    decision = decide(MonitorState(run(mismatch=-0.2)))
    assert decision.update is True and "mismatch over steps 30 to 39 is -0.199 [-0.2" in decision.reason


def test_significant_but_small_mismatch_does_not_pay():
    decision = decide(MonitorState(run(mismatch=-0.03, noise=0.001), min_mismatch=0.05))
    assert decision.update is False and decision.evidence["mismatch_high"] < 0


def test_better_heads_than_predicted_need_no_update():
    assert decide(MonitorState(run(mismatch=0.2))).update is False


def test_insignificant_loss_in_clear_data_needs_no_update():
    decision = decide(MonitorState(run(mismatch=-0.02, noise=0.04)))
    assert decision.evidence["mismatch_low"] < -0.05 < 0 < decision.evidence["mismatch_high"]
    assert decision.update is False and "not significant" in decision.reason


def test_interval_too_wide_to_tell_is_undetermined_never_no():
    decision = decide(MonitorState(run(noise=0.4)))
    assert decision.update is None and decision.reason.startswith("undetermined: mismatch over steps")


def test_entropy_outside_the_pre_rl_range_asks_for_an_update():
    history = run()
    inside = decide(MonitorState(history, entropy_range=(0.2, 0.8)))
    outside = decide(MonitorState(history, entropy_range=(0.6, 0.9)))
    assert inside.update is False
    assert outside.update is True and "has left the range of the pre-RL data, 0.600 to 0.900" in outside.reason


def test_constant_entropy_gives_no_decision():
    decision = decide(MonitorState([step(t, 0.4, 2.5 + 0.01 * (t % 3)) for t in range(40)]))
    assert decision.update is None and decision.reason == "undetermined: entropy is constant (0.4 nats)"


def test_mixed_draft_lengths_give_no_decision():
    history = [replace(entry, counts=replace(entry.counts, mixed_lengths=True)) for entry in run(mismatch=-0.5)]
    decision = decide(MonitorState(history))
    assert decision.update is None and "mixed lengths" in decision.reason
    pooled = history[0].counts + DraftCounts(10, 10, (5,))
    assert pooled.mixed_lengths
    assert pooled.conditional_acceptance[0] == pytest.approx(1, abs=1e-3)
    assert pooled.conditional_acceptance[1:] == (None, None)


def test_no_drafts_is_no_data_not_zero():
    history = [step(t, 0.4 + 0.01 * t, None) for t in range(40)]
    history += [StepRecord(40, 0.5, DraftCounts(0, 0, (0, 0, 0)), 3, "rejection", 1.0)]
    decision = decide(MonitorState(history))
    assert decision.update is None and decision.reason.startswith("no data: no step of 41 has drafts")
    assert history[-1].acceptance_length is None and decompose(history).parts == ()
    assert decide(MonitorState([])).update is None


def test_too_few_steps_are_undetermined_with_the_number_needed():
    decision = decide(MonitorState(run()[:7], min_steps=8))
    assert decision.update is None and decision.reason == "undetermined: 7 steps with drafts, at least 9 are needed"


def test_unusable_steps_are_left_out_and_counted():
    history = run()
    history[5] = step(5, None, 3.0)
    history[6] = step(6, float("nan"), 3.0)
    decision = decide(MonitorState(history))
    assert decision.update is False and decision.evidence["steps_used"] == 38


@pytest.mark.parametrize("bad", [(0.5, 0.1), (0.1,), (-1.0, 2.0)])
def test_entropy_range_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="entropy_range: "):
        decide(MonitorState(run(), entropy_range=bad))


def test_counts_give_conditional_acceptance_and_length():
    counts = DraftCounts(100, 300, (80, 48, 24))
    assert counts.conditional_acceptance == pytest.approx((0.8, 0.6, 0.5))
    assert counts.acceptance_length == pytest.approx(2.52)
    pooled = DraftCounts(10, 10, (1,)) + DraftCounts(100, 100, (90,))
    assert pooled.conditional_acceptance[0] == pytest.approx(0.827, abs=5e-4)


def test_longer_drafts_alone_are_no_slope_and_no_mismatch():
    """Conditional acceptance .8 throughout: the accepted share is .80, .65, .54 at k = 1, 3, 5; all else is equal."""
    history, entropy = [], np.random.default_rng(0).normal(0.4, 0.02, 60)
    for t in range(60):
        k = (1, 3, 5)[t // 20]
        accepted = tuple(round(NUM_DRAFTS * 0.8**j) for j in range(1, k + 1))
        counts = DraftCounts(NUM_DRAFTS, NUM_DRAFTS * k, accepted)
        history.append(StepRecord(t, float(entropy[t]) + 0.05 * k, counts, k, "rejection", 1.0))
    shares = [
        sum(s.counts.accepted_per_depth) / s.counts.num_draft_tokens for s in (history[0], history[20], history[40])
    ]
    assert shares == pytest.approx([0.800, 0.651, 0.538], abs=5e-4)

    groups = split_by_definition(history)
    assert [(definition.num_speculative_tokens, len(steps)) for definition, steps in groups.items()] == [
        (1, 20),
        (3, 20),
        (5, 20),
    ]
    assert all(abs(slope_of(steps).slope) < 1e-9 for steps in groups.values())
    with pytest.raises(ValueError, match=r"k=1, rejection, T=1; k=3, .* expected one definition"):
        slope_of(history)
    decision = decide(MonitorState(history))
    assert decision.update is False and decision.evidence["steps_used"] == 20
    assert decision.evidence["num_speculative_tokens"] == 5


def test_parts_add_up_and_mismatch_is_the_regression_residual():
    history = run(mismatch=-0.2, noise=0.0)
    parts = decompose(history)
    assert parts.early_steps == (0, 19) and parts.recent_steps == (30, 39)
    for part, record in zip(parts.parts, history, strict=True):
        assert part.change == pytest.approx(part.entropy.value + part.mismatch.value)
        expected = -(record.entropy_nats - history[0].entropy_nats)
        assert part.entropy.value == pytest.approx(expected, abs=2e-3)
        assert part.mismatch.value == pytest.approx(-0.2 if record.step >= 20 else 0.0, abs=2e-3)
        assert part.entropy.low <= part.entropy.value <= part.entropy.high
    assert parts.recent.value == pytest.approx(-0.2, abs=2e-3)


def test_mismatch_interval_covers_and_includes_the_slopes_error():
    inside, widths = 0, {}
    for seed in range(200):
        recent = decompose(run(noise=0.05, seed=seed, drift=-0.3)).recent
        inside += recent.low <= 0 <= recent.high
    assert inside / 200 >= 0.9
    for drift in (0.0, -0.3):
        fits = [decompose(run(noise=0.05, seed=seed, drift=drift)).recent for seed in range(30)]
        widths[drift] = np.mean([fit.high - fit.low for fit in fits])
    assert widths[-0.3] > 1.2 * widths[0.0], "far from the early entropies the slope's uncertainty must show"


def test_short_run_fits_its_line_before_the_recent_steps():
    parts = decompose(run(num_steps=12), early_steps=20)
    assert parts.early_steps == (0, 6) and parts.recent_steps == (7, 11)
