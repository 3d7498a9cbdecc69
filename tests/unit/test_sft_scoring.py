"""Scored acceptance: from heads and text to P(first j drafts accepted), by rejection sampling and target-only."""

import itertools

import pytest
import torch

from bebop.acceptance import scores as scoring
from bebop.data.batches import TrainBatch

P, Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]


def test_statistics_of_known_distributions():
    """Logits are log-probabilities and the vocabulary matrix is the identity."""
    draft = torch.tensor(Q).log().expand(1, 3, 3)
    target = (torch.tensor([P[::-1], P]).log(), torch.ones(1, 3, dtype=torch.long))  # every draft's is the second row
    tokens = torch.tensor([[0, 1, 2]])
    found = scoring._statistics(draft, target, tokens, torch.eye(3), 1.0)
    assert found["alpha"].tolist() == [pytest.approx([0.6] * 3)]
    assert found["target_logprob"].exp().tolist() == [pytest.approx(P)]
    assert found["draft_logprob"].exp().tolist() == [pytest.approx(Q)]
    assert found["top_prob"].tolist() == [pytest.approx([0.2] * 3)]
    assert found["top_logweight"].tolist() == [[-torch.inf, -torch.inf, 0.0]]


def _chain(first, second):
    """Exact P(first 1, 2 drafts accepted): first[y] and second[y1] are (p, q) of the next token; by enumeration."""
    p, q = first
    rejection = [sum(min(a, b) for a, b in zip(p, q, strict=True)), 0.0]
    top = max(range(3), key=lambda v: q[v])
    target_only = [p[top], 0.0]
    for y in range(3):
        p2, q2 = second[y]
        rejection[1] += min(p[y], q[y]) * sum(min(a, b) for a, b in zip(p2, q2, strict=True))
    p2, q2 = second[top]
    target_only[1] = p[top] * p2[max(range(3), key=lambda v: q2[v])]
    return rejection, target_only


def test_scores_of_the_policys_own_text_equal_enumeration():
    """Text with every pair of tokens as often as the policy samples it: the weighted form is exact there."""
    first = (P, Q)
    second = [([0.1, 0.2, 0.7], [0.3, 0.3, 0.4]), ([0.6, 0.2, 0.2], [0.5, 0.1, 0.4]), (Q, P)]
    rows, labels = [], []
    for y1, y2 in itertools.product(range(3), repeat=2):
        copies = round(1000 * P[y1] * second[y1][0][y2])
        rows += [(first, second[y1])] * copies
        labels += [(y1, y2)] * copies
    n = len(rows)
    draft = torch.tensor([[r[k][1] for r in rows] for k in range(2)]).log()  # [K,N,V], and D = V
    target = torch.tensor([[r[k][0] for r in rows] for k in range(2)]).log().flatten(0, 1)
    batch = TrainBatch(
        hidden=target,
        input_ids=torch.zeros(1, dtype=torch.long),
        cu_seqlens=torch.tensor([0, 1]),
        position_ids=torch.zeros(1, dtype=torch.long),
        anchors=torch.arange(n),
        target_index=torch.arange(2 * n).view(2, n),
        labels=torch.tensor(labels).T.contiguous(),
    )
    found = scoring.score_rows([(draft, batch)], torch.eye(3), temperature=1.0, chunk_elements=1000)
    rejection, target_only = _chain(first, second)
    assert found.num_anchors == n == 1000
    assert found.accepted == pytest.approx(rejection, abs=1e-6)
    assert found.accepted_target_only == pytest.approx(target_only, abs=1e-6)
    assert found.acceptance_length == pytest.approx(1 + sum(rejection), abs=1e-6)
    assert found.conditional == pytest.approx((rejection[0], rejection[1] / rejection[0]), abs=1e-6)


def test_no_text_is_an_error():
    with pytest.raises(ValueError, match="0 anchors"):
        scoring.score_rows([], torch.eye(3), temperature=1.0)


def test_sequence_entropy_is_over_supervised_tokens_at_the_temperature():
    """Rows that predict the prompt or nothing do not count: logits [2,1,0] have .8324 nats at T 1 and .4411 at T .5."""
    read, other = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([9.0, 0.0, 0.0])
    batch = TrainBatch(
        hidden=torch.stack([other, read, read, other, other, other]),
        input_ids=torch.zeros(6, dtype=torch.long),
        cu_seqlens=torch.tensor([0, 4, 6]),
        position_ids=torch.zeros(6, dtype=torch.long),
        anchors=torch.zeros(0, dtype=torch.long),
        target_index=torch.zeros(2, 0, dtype=torch.long),
        labels=torch.zeros(2, 0, dtype=torch.long),
    )
    mask = torch.tensor([0, 0, 1, 1, 0, 0]).bool()
    for temperature, nats in ((1.0, 0.8324), (0.5, 0.4411)):
        found = scoring.sequence_entropies([(batch, mask)], torch.eye(3), temperature=temperature)
        assert found == pytest.approx([nats], abs=1e-4)
