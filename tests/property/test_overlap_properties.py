"""Properties that hold for every pair of distributions, every mask and every packing."""

from __future__ import annotations

import itertools

import bebop_kernels as bk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.data import anchors, mtp_labels, pack
from bebop.losses import e2e_tv

logit = st.floats(-20, 20, width=32) | st.just(float("-inf"))
row_pairs = st.integers(2, 12).flatmap(
    lambda v: st.lists(st.tuples(*[st.lists(logit, min_size=v, max_size=v)] * 2), min_size=1, max_size=5)
)
documents = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=6
)


def tensors(pairs):
    return tuple(torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in range(2))


@settings(max_examples=60, deadline=None)
@given(row_pairs, st.floats(0.2, 3))
def test_overlap_is_a_symmetric_probability_with_gradient_summing_to_zero(pairs, temperature):
    draft, target = tensors(pairs)
    leaf = draft.clone().requires_grad_()
    alpha = bk.tv_overlap(leaf, target, temperature=temperature)
    alpha.sum().backward()
    assert ((alpha >= 0) & (alpha <= 1)).all()
    torch.testing.assert_close(alpha, bk.tv_overlap(target, draft, temperature=temperature))
    assert leaf.grad.isfinite().all()
    torch.testing.assert_close(leaf.grad.sum(-1), torch.zeros(len(draft), dtype=torch.float64), atol=1e-12, rtol=0)


@settings(max_examples=40, deadline=None)
@given(row_pairs, st.floats(0.2, 3))
def test_statistics_obey_pinsker_and_entropies_are_not_negative(pairs, temperature):
    draft, target = tensors(pairs)
    stats = bk.tv_statistics(draft, target, temperature=temperature)
    assert (stats.target_entropy >= -1e-6).all()
    # Pinsker: TV <= sqrt(KL / 2)
    alive = (draft > -torch.inf).any(-1) & (target > -torch.inf).any(-1)
    assert ((1 - stats.alpha)[alive] <= (stats.kl[alive] / 2).sqrt() + 1e-3).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_end_to_end_loss_is_a_probability_decreasing_in_alpha(alphas):
    alpha = torch.tensor(alphas, dtype=torch.float64).requires_grad_()
    loss = e2e_tv(alpha)
    loss.sum().backward()
    assert ((loss >= -1e-12) & (loss <= 1)).all()
    assert (alpha.grad <= 0).all() and alpha.grad.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(1, 4))
def test_anchors_are_followed_by_a_whole_horizon_of_supervised_tokens(texts, depth):
    sequences = [([t for t, _ in text], [int(m) for _, m in text]) for text in texts]
    if not any(any(mask) for _, mask in sequences):
        return
    batches = pack(sequences, 16)
    assert sum(len(b.input_ids) for b in batches) == sum(map(len, texts))
    expected, got, document = [], [], 0
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        at = set(anchors(batch, depth).tolist())
        labels = [mtp_labels(batch.input_ids, batch.loss_mask, batch.cu_seqlens, d) for d in range(depth + 1)]
        for start, end in itertools.pairwise(bounds):
            ids, mask = sequences[document]
            assert batch.input_ids[start:end].tolist() == ids
            for t in range(end - start):
                horizon = range(t + 1, t + depth + 2)
                whole = horizon[-1] < len(ids) and all(mask[i] for i in horizon)
                expected.append(whole)
                got.append(start + t in at)
                if whole:
                    assert [label[start + t].item() for label in labels] == [ids[i] for i in horizon]
            document += 1
    assert got == expected
