"""Tiles left out of the backward pass: few of the gradient's digits, by the bound that is promised."""

from __future__ import annotations

import bebop_kernels as bk
import pytest
import torch
from bebop_kernels.cpu_loops import TILE


def pair(dtype, num_tiles=6, left_over=77):
    """Four rows whose mass falls tile by tile, by e^-6 each; the last row is -inf beyond its first tile."""
    generator = torch.Generator().manual_seed(0)
    width = num_tiles * TILE + left_over
    fall = torch.arange(width) // TILE * 6.0
    target = torch.randn(4, width, generator=generator) - fall
    draft = target + 0.5 * torch.randn(4, width, generator=generator)
    draft[3, TILE:] = -torch.inf
    return draft.to(dtype), target.to(dtype)


def alpha_and_grad(function, draft, target, scale):
    leaf = draft.clone().requires_grad_()
    alpha = function(leaf, target)
    (alpha * scale).sum().backward()
    return alpha.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-5])
def test_alpha_is_exact_and_the_gradient_is_within_the_bound(dtype, temperature, tolerance):
    draft, target = pair(dtype)
    scale = torch.tensor([1.0, -2.0, 3.0, 0.5])
    alpha, grad = alpha_and_grad(
        lambda d, t: bk.tv_overlap_skipping(d, t, tolerance, temperature=temperature), draft, target, scale
    )
    whole, whole_grad = alpha_and_grad(
        lambda d, t: bk.tv_overlap(d, t, temperature=temperature, impl="cpu"), draft, target, scale
    )
    assert torch.equal(alpha, whole) and grad.dtype == dtype
    left_out = (grad == 0) & (whole_grad != 0)
    assert left_out[:3, 5 * TILE :].any(1).all() and not left_out[:, :TILE].any()
    assert torch.equal(grad[~left_out], whole_grad[~left_out])
    off = (grad.double() - whole_grad.double()).abs().sum(1)
    assert (off <= tolerance / temperature * scale.abs()).all()


def test_bad_arguments_are_named():
    rows = torch.zeros(2, 5)
    for tolerance in (0.0, -1.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match=r"^tolerance="):
            bk.tv_overlap_skipping(rows, rows, tolerance)
    with pytest.raises(ValueError, match=r"^target_logits: "):
        bk.tv_overlap_skipping(rows, rows[:1], 0.1)
    with pytest.raises(ValueError, match=r"^impl=.cpu.: computes in float32; for float64"):
        bk.tv_overlap_skipping(rows.double(), rows.double(), 0.1)
    with pytest.raises(ValueError, match=r"^draft_logits: NaN"):
        bk.tv_overlap_skipping(rows * float("nan"), rows, 0.1)


def test_no_rows():
    rows = torch.zeros(0, 5, requires_grad=True)
    bk.tv_overlap_skipping(rows, rows.detach(), 0.1).sum().backward()
    assert rows.grad.shape == (0, 5)
