"""Scored acceptance: from heads and text to P(first j drafts accepted), by every rule."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from bebop.acceptance import concatenate, score_anchors, score_batches, summarise
from bebop.acceptance.scores import sequence_entropies
from bebop.data.batches import TrainBatch

P, Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
VOCABULARY = torch.eye(3)


class FixedHead(torch.nn.Module):
    """A head whose output [K, N, D] is given."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.config = rows, SimpleNamespace(hidden_size=rows.shape[-1])

    def forward(self, *_):
        return self.rows


def case(draft, target, labels, cu_seqlens=None):
    """The head and the batch of N anchors, each in a document of its own. draft, target [K, N, 3] probabilities: logits
    are their logarithms and the vocabulary matrix is the identity."""
    depth, num = len(labels), len(labels[0])
    size = depth * num
    starts = torch.arange(num) * depth
    batch = TrainBatch(
        hidden=torch.tensor(target).log().transpose(0, 1).flatten(0, 1),
        input_ids=torch.zeros(size, dtype=torch.long),
        cu_seqlens=torch.arange(0, size + 1, depth) if cu_seqlens is None else torch.tensor(cu_seqlens),
        position_ids=torch.arange(size) % depth,
        anchors=starts,
        target_index=starts + torch.arange(depth)[:, None],
        labels=torch.tensor(labels),
    )
    return FixedHead(torch.tensor(draft).log()), batch


def score(*arguments, temperature=1.0, **options):
    head, batch = case(*arguments)
    return score_anchors(head, batch, VOCABULARY, VOCABULARY, temperature=temperature, **options)


def test_scores_of_known_distributions():
    scores = score([[Q, Q, Q]], [[P, P, P]], [[0, 1, 2]])
    assert scores.alpha.tolist() == [pytest.approx([0.6] * 3)]
    assert scores.target_logprob.exp().tolist() == [pytest.approx(P)]
    assert scores.draft_logprob.exp().tolist() == [pytest.approx(Q)]
    assert scores.target_prob_of_draft_argmax.tolist() == [pytest.approx([0.2] * 3)]
    assert scores.is_draft_argmax.tolist() == [[False, False, True]]
    entropies = torch.distributions.Categorical(torch.tensor([P, Q])).entropy()
    assert [scores.target_entropy[0, 0], scores.draft_entropy[0, 0]] == pytest.approx(entropies.tolist())
    assert scores.document.tolist() == [0, 1, 2] and scores.num_documents == 3


def _chain(first, second):
    """Exact P(first 1, 2 drafts accepted); first and second[y1] are (p, q) of the next token."""
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


SECOND = [([0.1, 0.2, 0.7], [0.3, 0.3, 0.4]), ([0.6, 0.2, 0.2], [0.5, 0.1, 0.4]), (Q, P)]


def text_of(sampler):
    """Anchors with every pair of tokens as often as `sampler`, (first token, second by first), samples it."""
    first, second = sampler
    pairs = [
        (pair, round(1000 * first[pair[0]] * second[pair[0]][pair[1]]))
        for pair in itertools.product(range(3), repeat=2)
    ]
    texts = [pair for pair, copies in pairs for _ in range(copies)]
    assert len(texts) == 1000
    draft = [[Q for _ in texts], [SECOND[y][1] for y, _ in texts]]
    target = [[P for _ in texts], [SECOND[y][0] for y, _ in texts]]
    return texts, (draft, target, [[y for y, _ in texts], [z for _, z in texts]])


def test_scores_of_the_policys_own_text_equal_enumeration():
    _, arguments = text_of((P, [p for p, _ in SECOND]))
    summary = summarise(score(*arguments, chunk_elements=1000))
    rejection, target_only = _chain((P, Q), SECOND)
    assert summary.num_anchors == summary.num_documents == 1000
    assert summary.accepted == pytest.approx(rejection, abs=1e-6)
    assert summary.rules["target_only"].accepted == pytest.approx(target_only, abs=1e-6)
    assert summary.acceptance_length == pytest.approx(1 + sum(rejection), abs=1e-6)
    assert summary.conditional == pytest.approx((rejection[0], rejection[1] / rejection[0]), abs=1e-6)
    assert summary.effective_sample_size == (1000, 1000)
    record = summary.as_dict()
    assert record["accepted_target_only"] == summary.rules["target_only"].accepted
    assert record["acceptance_length_block"] >= record["acceptance_length"] == summary.acceptance_length


def test_text_of_another_sampler_is_corrected_by_its_probabilities():
    """Sampled uniformly and weighted by p / p_r, every rule gives what the policy's own text gives."""
    _, own = text_of((P, [p for p, _ in SECOND]))
    expected = summarise(score(*own))
    third = [0.5, 0.25, 0.25]
    texts, arguments = text_of((third, [[0.4, 0.4, 0.2]] * 3))
    head, batch = case(*arguments)
    sampled = torch.zeros(len(batch.input_ids) + 1)
    sampled[batch.target_index + 1] = torch.tensor([[third[y], [0.4, 0.4, 0.2][z]] for y, z in texts]).log().T
    weighted = summarise(score_anchors(head, batch, VOCABULARY, VOCABULARY, temperature=1.0, sampled_logprobs=sampled))
    unweighted = summarise(score(*arguments))
    assert weighted.effective_sample_size[0] == 1000 and 300 < weighted.effective_sample_size[1] < 1000
    for rule in expected.rules:
        assert weighted.rules[rule].accepted == pytest.approx(expected.rules[rule].accepted, abs=1e-6), rule
    assert abs(unweighted.accepted[1] - expected.accepted[1]) > 1e-3


def test_documents_are_numbered_over_batches():
    head, batch = case([[Q, Q]], [[P, P]], [[0, 1]])
    scores = score_batches(head, [batch, batch], VOCABULARY, VOCABULARY, temperature=1.0)
    assert scores.document.tolist() == [0, 1, 2, 3] and scores.num_documents == 4
    assert scores.of_documents([1, 2]).target_logprob.exp().tolist() == [pytest.approx([P[1], P[0]])]
    with pytest.raises(ValueError, match="got 0 anchors"):
        concatenate([])


def test_errors_count_documents():
    """Anchors that repeat within their documents carry no more information than the documents."""
    one = summarise(score([[Q, P, P, Q]], [[P, P, P, P]], [[0, 0, 0, 0]]))
    head, batch = case([[Q, Q, P, P, P, P, Q, Q]], [[P] * 8], [[0] * 8], cu_seqlens=[0, 2, 4, 6, 8])
    repeated = summarise(score_anchors(head, batch, VOCABULARY, VOCABULARY, temperature=1.0))
    assert repeated.num_documents == 4 and repeated.num_anchors == 8
    assert one.acceptance_length_se > 0
    assert repeated.acceptance_length_se == pytest.approx(one.acceptance_length_se)


def test_sequence_entropy_is_over_supervised_tokens_at_the_temperature():
    """Rows that predict the prompt or nothing do not count: logits [2,1,0] have 0.8324 nats at T 1, 0.4411 at T 0.5."""
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
        entropies = sequence_entropies([(batch, mask)], torch.eye(3), temperature=temperature)
        assert entropies == pytest.approx([nats], abs=1e-4)
