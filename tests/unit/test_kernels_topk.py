"""The overlap over the target's K likeliest tokens: its certificate holds, its gradient is that of what it returns."""

from __future__ import annotations

import bebop_kernels as bk
import pytest
import torch


def pair(rows, vocab_size, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    return (target + torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)).to(dtype), target.to(
        dtype
    )


@pytest.mark.parametrize("k", [1, 3, 20, 200])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_whole_overlap_lies_within_the_certificate(k, temperature):
    draft, target = pair(50, 200)
    alpha, upper = bk.tv_overlap_topk(draft, target, k, temperature=temperature)
    whole = bk.tv_overlap(draft, target, temperature=temperature)
    assert (alpha <= whole + 1e-12).all() and (whole <= upper + 1e-12).all()
    assert (upper - alpha > 1e-3).any() == (k < 200)


def test_the_gradient_is_that_of_the_value_and_sums_to_zero():
    draft, target = pair(40, 60)
    leaf, plain = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    scale = torch.arange(1.0, 41.0, dtype=torch.float64)
    (bk.tv_overlap_topk(leaf, target, 7, temperature=0.7)[0] * scale).sum().backward()
    p, q = (target / 0.7).softmax(-1), (plain / 0.7).softmax(-1)
    ids = p.topk(7).indices
    (torch.minimum(p, q).gather(1, ids).sum(-1) * scale).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, atol=1e-12, rtol=1e-9)
    assert leaf.grad.sum(-1).abs().max() < 1e-12


def test_equal_rows_have_no_gradient_and_filtered_rows_are_finite():
    draft, target = pair(4, 30, torch.float32)
    draft[0] = target[0]
    target[1, 5:] = -torch.inf
    draft[2], target[3] = -torch.inf, -torch.inf
    leaf = draft.clone().requires_grad_()
    alpha, upper = bk.tv_overlap_topk(leaf, target, 10)
    alpha.sum().backward()
    assert (leaf.grad[0] == 0).all() and leaf.grad.isfinite().all()
    assert alpha[2:].tolist() == upper[2:].tolist() == [0, 0]
    assert float((upper - alpha.detach())[1]) < 1e-6


def test_no_rows_and_a_k_outside_the_vocabulary():
    assert bk.tv_overlap_topk(torch.empty(0, 5), torch.empty(0, 5), 2)[0].shape == (0,)
    for k in (0, 6, 1.5, True):
        with pytest.raises(ValueError, match="expected an integer in"):
            bk.tv_overlap_topk(torch.zeros(2, 5), torch.zeros(2, 5), k)
