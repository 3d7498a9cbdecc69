"""Observed against scored acceptance: how rarely a correct engine raises an alarm, and how surely other heads do."""

import numpy as np
import pytest
import torch

from bebop.acceptance import AnchorScores, summarise
from bebop.evaluate import stage
from bebop.evaluate.agreement import MIN_RESPONSES, RUN_ERROR, compare, draw_variance, expected_counts, judge
from bebop.evaluate.table import render, rows_of
from bebop.records import DraftCounts

DEPTH = 3


def _text(rng, responses, tokens, alpha):
    """[K+2,L,S] acceptances given the text around `alpha` a draft; geometric lengths, `tokens` in the mean."""
    lengths = np.clip(rng.geometric(1 / tokens, responses), 2, 4 * tokens)
    table = np.zeros((DEPTH + 2, lengths.max(), responses))
    table[0] = np.arange(lengths.max())[:, None] < lengths
    table[1:-1] = table[0] * rng.beta(4 * alpha, 4 * (1 - alpha), table[1:-1].shape).cumprod(0)
    return table


def _play(rng, table, times):
    """The engine's rounds along the text, `times` over: accepted [T,K,S], drafts [T,S]."""
    _, length, responses = table.shape
    at = np.zeros((times, responses), dtype=int)
    accepted, drafts = np.zeros((times, DEPTH, responses)), np.zeros((times, responses))
    while True:
        here = table[:, np.minimum(at, length - 1), np.arange(responses)] * (at < length)
        live = here[0] > 0
        if not live.any():
            return accepted, drafts
        taken = rng.random(at.shape) < here[1:-1]  # the first j accepted, for each j
        accepted, drafts = accepted + taken.transpose(1, 0, 2), drafts + live
        at = at + taken.sum(0) + 1


def _worse(table, by):
    """The same text under heads whose every alpha is lower by `by`."""
    alone = table[1:-1] / np.where(table[:-2] > 0, table[:-2], 1)
    other = table.copy()
    other[1:-1] = table[0] * np.maximum(alone - by, 0).cumprod(0)
    return other


def _joined(tables):
    length = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, length - t.shape[1]), (0, 0))) for t in tables], 2)


def _share_of_runs_with_alarm(rng, times, *, sizes, temperatures, tokens, alpha, by=0.0):
    """Runs of some tasks and of all of them together, at some temperatures; the engine is off by `by`."""
    alarms, many = np.zeros(times, dtype=bool), (len(sizes) + 1) * temperatures
    for _ in range(temperatures):
        tables = [_text(rng, size, tokens, alpha) for size in sizes]
        played = [_play(rng, _worse(table, by), times) for table in tables]
        tables.append(_joined(tables))
        played.append(tuple(np.concatenate(parts, -1) for parts in zip(*played, strict=True)))
        for table, (accepted, drafts) in zip(tables, played, strict=True):
            judged = (judge(a, d, table, 1 - RUN_ERROR / many) for a, d in zip(accepted, drafts, strict=True))
            alarms |= np.array([each.agrees is False for each in judged])
    return alarms.mean()


@pytest.mark.parametrize("alpha", [0.6, 0.95])
def test_correct_engine_raises_an_alarm_in_1_percent_of_runs(alpha):
    """Few and short responses; at 0.95 many are fully accepted, so that they show no spread."""
    rng = np.random.default_rng(0)
    share = _share_of_runs_with_alarm(rng, 1500, sizes=(16, 40), temperatures=2, tokens=20, alpha=alpha)
    assert share <= 0.015


@pytest.mark.parametrize("alpha", [0.7, 0.9])
def test_alpha_off_by_5_percent_is_detected_with_64_responses(alpha):
    rng = np.random.default_rng(1)
    share = _share_of_runs_with_alarm(rng, 100, sizes=(64,), temperatures=1, tokens=60, alpha=alpha, by=0.05)
    assert share > 0.95
    several = _share_of_runs_with_alarm(rng, 100, sizes=(64, 64), temperatures=3, tokens=60, alpha=alpha, by=0.05)
    assert several > 0.95, "over more comparisons each interval is wider, and the tasks together have more responses"


def test_the_variance_of_the_draws_is_that_of_played_rounds():
    rng = np.random.default_rng(2)
    table = _text(rng, 5, 12, 0.8)
    expected, visits = expected_counts(table)
    scored = expected.sum(1) / visits.sum()
    accepted, drafts = _play(rng, table, 40_000)
    played = (accepted - scored[:, None] * drafts[:, None]).var(0)
    assert draw_variance(table, scored) == pytest.approx(played, rel=0.05)


def _case(rng, responses, by=0.0):
    """Scores and the engine's counts of as many responses."""
    table = _text(rng, responses, 40, 0.8)
    position, response = np.nonzero(table[0])
    given = table[1:-1, position, response]
    own = torch.tensor(np.concatenate([given[:1], given[1:] / given[:-1]]))
    ((accepted,), (drafts,)) = _play(rng, _worse(table, by), 1)
    zeros = torch.zeros(given.shape)
    scores = AnchorScores(
        alpha=own,
        target_logprob=zeros,
        draft_logprob=own.log(),
        target_prob_of_draft_argmax=zeros,
        is_draft_argmax=zeros.bool(),
        target_entropy=zeros,
        draft_entropy=zeros,
        kl=zeros,
        document=torch.tensor(response),
        position=torch.tensor(position),
        num_documents=responses,
        temperature=1.0,
    )
    counts = {
        i: DraftCounts(int(drafts[i]), DEPTH * int(drafts[i]), tuple(map(int, accepted[:, i])))
        for i in range(responses)
    }
    return scores, counts


@pytest.mark.parametrize(("by", "agrees"), [(0.0, True), (0.3, False)])
def test_counts_of_responses_are_compared_with_their_scores(by, agrees):
    scores, counts = _case(np.random.default_rng(3), 64, by)
    agreement = compare(scores, counts, rule="rejection", num_drafts=DEPTH)
    assert agreement.agrees is agrees and agreement.num_responses == 64
    assert agreement.as_dict()["agrees"] is agrees
    shared = compare(scores, counts, rule="rejection", num_drafts=DEPTH, confidence=0.999)
    assert all(a > b for a, b in zip(shared.half_width_99, agreement.half_width_99, strict=True))


def test_too_few_responses_raise_no_alarm_and_say_so():
    """One response fewer than needed, of heads that are plainly others."""
    scores, counts = _case(np.random.default_rng(3), MIN_RESPONSES, 0.5)
    assert compare(scores, counts, rule="rejection", num_drafts=DEPTH).agrees is False
    del counts[0]
    agreement = compare(scores, counts, rule="rejection", num_drafts=DEPTH)
    assert agreement.agrees is None and not agreement.judged
    assert not stage.alarms({"temperature": 1.0, "tasks": {"all": {"agreement": agreement.as_dict()}}})
    rows = rows_of("all", sum(counts.values(), DraftCounts()), summarise(scores), agreement)
    assert "too few to judge" in render(rows)
    assert compare(scores, {1: counts[1]}, rule="rejection", num_drafts=DEPTH) is None
