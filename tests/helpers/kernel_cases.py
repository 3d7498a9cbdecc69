"""Shared by the tests of all kernel implementations: inputs, comparison with the reference, and rows of -inf."""

from __future__ import annotations

import bebop_kernels as bk
import torch


def pair(rows, vocab, dtype=torch.float32, noise=0.5, seed=0):
    """Draft and target logits [rows, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(rows, vocab, generator=generator) * 2
    draft = target + noise * torch.randn(rows, vocab, generator=generator)
    return draft.to(dtype), target.to(dtype)


def alpha_and_grad(draft, target, impl, temperature=1.0, scale=None):
    """alpha, and the draft gradient of sum(scale * alpha); scale None: 1, 2, 3, ... by row."""
    leaf = draft.detach().requires_grad_()  # no copy: strides stay
    alpha = bk.tv_overlap(leaf, target, temperature=temperature, impl=impl)
    (alpha * (torch.arange(1.0, 1 + len(alpha)) if scale is None else scale)).sum().backward()
    return alpha.detach(), leaf.grad


def assert_like_reference(impl, draft, target, temperature=1.0, scale=None, grad_atol=1e-6):
    """alpha and gradient by `impl`, close to the reference; the gradient is finite and in the draft's type."""
    alpha, grad = alpha_and_grad(draft, target, impl, temperature, scale)
    expected, expected_grad = alpha_and_grad(draft, target, "reference", temperature, scale)
    torch.testing.assert_close(alpha, expected, atol=1e-6, rtol=1e-5)
    assert grad.dtype == draft.dtype and grad.isfinite().all()
    ulp = {torch.float32: 1e-5, torch.bfloat16: 1 / 128, torch.float16: 1 / 1024}[draft.dtype]
    torch.testing.assert_close(grad.float(), expected_grad.float(), atol=grad_atol, rtol=ulp)
    return alpha, grad


def assert_statistics_like_reference(impl, draft, target, temperature=1.0, tolerance=5e-6):
    tokens = torch.arange(len(draft)) % draft.shape[1]
    fields = [
        bk.tv_statistics(draft, target, tokens=tokens, temperature=temperature, impl=each)
        for each in (impl, "reference")
    ]
    for name, got, expected in zip(bk.TvStatistics._fields, *fields, strict=True):
        torch.testing.assert_close(
            got, expected, atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


class MinusInfinity:
    """Rows, tiles and single logits of -inf. A test class sets the implementation and its tolerances."""

    impl: str
    grad_atol: float
    tolerance: float  # of statistics

    def test_in_both_rows_one_row_and_a_whole_first_tile(self):
        draft, target = pair(5, 6001, noise=0.15)
        draft[0, 40:80] = target[0, 40:80] = -torch.inf
        draft[1, 5000:] = -torch.inf
        target[2, ::2] = -torch.inf
        draft[3, :4096] = target[3, :4096] = -torch.inf
        draft[4, :6000] = -torch.inf
        alpha, grad = assert_like_reference(self.impl, draft, target, grad_atol=self.grad_atol)
        assert (grad[draft == -torch.inf] == 0).all()
        assert alpha[3] > 0.9

    def test_a_row_of_minus_infinity_has_zero_overlap_and_gradient(self):
        draft, target = torch.zeros(3, 4), torch.zeros(3, 4)
        draft[0] = target[1] = draft[2] = target[2] = -torch.inf
        alpha, grad = assert_like_reference(self.impl, draft, target, grad_atol=self.grad_atol)
        assert (alpha == 0).all() and (grad == 0).all()

    def test_in_statistics(self):
        draft, target = pair(4, 500)
        draft[0] = -torch.inf
        target[1, 3:90] = -torch.inf
        draft[2, 7] = -torch.inf
        assert_statistics_like_reference(self.impl, draft, target, tolerance=self.tolerance)
