"""The numbers of a step: counts, entropy, groups, staleness and the probability gap."""

from __future__ import annotations

import math

import pytest
import torch

from bebop.records import DraftCounts
from bebop.rl.trainer.step_metrics import (
    counts_of,
    largest_probability_gap,
    masked_mean,
    mean_of_requests,
    numbers,
    pooled,
    staleness,
    verifier_failures,
    zero_spread_share,
)


def fields(drafts: int, accepted: list[int]) -> dict:
    return {
        "spec_num_verify_steps": drafts,
        "spec_num_draft_tokens": 3 * drafts,
        "spec_num_accepted_tokens": sum(accepted),
        "spec_accepted_per_depth": accepted,
    }


def test_pooled_counts_keep_depths_and_give_conditional_acceptance():
    counts = [counts_of(fields(60, [50, 30, 20])), None, counts_of(fields(40, [30, 18, 4]))]
    total = pooled(counts)
    assert total == DraftCounts(100, 300, (80, 48, 24))
    assert total.conditional_acceptance == pytest.approx((0.8, 0.6, 0.5))
    assert total.acceptance_length == pytest.approx(2.52)


def test_pooled_and_mean_of_requests_are_told_apart():
    one, many = counts_of(fields(10, [1])), counts_of(fields(100, [90]))
    assert pooled([one, many]).acceptance_length == pytest.approx(1 + 91 / 110)
    assert mean_of_requests([one, many]) == pytest.approx(1.5)


def test_no_drafts_is_no_data():
    assert counts_of({}) is None
    assert counts_of(fields(0, [])) is None
    assert pooled([None, None]) is None
    assert mean_of_requests([None]) is None


def test_entropy_covers_emitted_tokens_only():
    entropy = torch.tensor([[0.1, 5.0, 0.3]])  # the middle one belongs to a rejected draft, outside the response
    assert masked_mean(entropy, torch.tensor([[1, 0, 1]])) == pytest.approx(0.2)
    assert masked_mean(entropy, torch.zeros(1, 3)) is None


def test_zero_spread_groups_are_counted_per_group():
    groups = ["a", "a", "b", "b", "b", "c"]
    assert zero_spread_share(groups, [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]) == pytest.approx(2 / 3)
    assert zero_spread_share([], []) is None


def test_staleness_is_counted_from_the_oldest_sampling_weights():
    assert staleness([{"min_global_steps": 4}, {"min_global_steps": 6}], trained_version=6) == [2, 0]


def test_probability_gap_looks_at_chosen_rows_and_response_tokens():
    trainer = torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.9]]))
    rollout = torch.log(torch.tensor([[0.5, 0.1], [0.5, 0.1]]))
    mask = torch.tensor([[1, 0], [1, 1]])
    assert largest_probability_gap(trainer, rollout, mask, torch.tensor([True, False])) == 0
    assert largest_probability_gap(trainer, rollout, mask, torch.tensor([True, True])) == pytest.approx(0.8)
    assert largest_probability_gap(trainer, rollout, mask, torch.tensor([False, False])) is None


def test_lost_log_probabilities_are_not_hidden_by_the_maximum():
    broken = torch.tensor([[0.0, math.nan]])
    assert math.isnan(largest_probability_gap(torch.zeros(1, 2), broken, torch.ones(1, 2), torch.tensor([True])))


def test_only_scalars_of_verls_metrics_are_kept():
    kept = numbers({"actor/lr": 1e-3, "one": torch.tensor(2.0), "text": "x", "many": [1, 2], "none": None})
    assert kept == {"actor/lr": 1e-3, "one": 2.0}


def test_failed_rewards_are_counted_by_kind():
    fields = [{"reward_extra_info": {"verifier_failure": kind}} for kind in ("", "timeout", "", "memory")]
    found = verifier_failures(fields)
    assert found["rewards/failed_share"] == 0.5
    assert found["rewards/failed_timeout"] == found["rewards/failed_memory"] == 1.0
    assert found["rewards/failed_died"] == 0.0
    assert verifier_failures([{}]) == {}
