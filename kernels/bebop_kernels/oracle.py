"""How far an implementation is from a float64 oracle on the same rounded inputs, beside the reference's own distance.

A token whose p and q are closer than arithmetic tells apart may fall on either side of q > p, which moves its gradient
by q: such ties are taken out of the vocabulary (their logits set to -inf in both rows) and counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bebop_kernels import naive
from bebop_kernels.overlap import tv_overlap

TIE_BAND = 1e-4  # in ln q - ln p; float32 logits of size 10 carry 1e-6
ROWS = 128  # enough that a mean over them is not the luck of one


class Errors(NamedTuple):
    """Errors of alpha [rows], of S [rows] as the gradient of the tokens with q <= p carries it, and of the gradient."""

    alpha: float
    over_mass: float
    gradient: float


class Verdict(NamedTuple):
    """An implementation's errors and the reference's: root mean squares over rows, and the largest.

    A row's error of the gradient is its largest over tokens.
    """

    own: Errors
    reference: Errors
    own_worst: Errors
    reference_worst: Errors
    rounding: Errors  # what a handful of roundings make of a right result: one lucky row of the reference is no bar
    ties: int

    @property
    def holds(self) -> bool:
        """Whether every mean error is at most twice the reference's, and every largest too or within rounding."""
        means = zip(self.own, self.reference, strict=True)
        worst = zip(self.own_worst, self.reference_worst, self.rounding, strict=True)
        return all(own <= 2 * reference for own, reference in means) and all(
            own <= max(2 * reference, rounding) for own, reference, rounding in worst
        )


def logits_pair(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, noise: float = 0.5):
    """Draft and target logits [rows, V] without ties, and how many there were."""
    generator = torch.Generator().manual_seed(vocab_size)
    target = torch.randn(rows, vocab_size, generator=generator) * 3
    draft = target + noise * torch.randn(rows, vocab_size, generator=generator)
    draft, target = draft.to(dtype), target.to(dtype)
    ties = 0
    # Without the ties the rest is normalised anew, and may hold new ones.
    for _ in range(20):
        distance = draft.double().log_softmax(-1) - target.double().log_softmax(-1)
        near = (distance.abs() < TIE_BAND) & (draft > -torch.inf)
        if not near.any():
            break
        ties += int(near.sum())
        draft, target = draft.masked_fill(near, -torch.inf), target.masked_fill(near, -torch.inf)
    return draft.to(device), target.to(device), ties


def judge(
    impl: str, rows: int, vocab_size: int, dtype: torch.dtype, device: str = "cpu", temperature: float = 1.0
) -> Verdict:
    draft, target, ties = logits_pair(rows, vocab_size, dtype, torch.device(device))
    leaf = draft.double().requires_grad_()
    alpha = naive.tv_overlap(leaf, target.double(), temperature=temperature)
    alpha.sum().backward()
    q = (draft.double() / temperature).softmax(-1)
    under = q <= (target.double() / temperature).softmax(-1)
    over_mass = (q * ~under).sum(-1)

    def errors(name: str) -> tuple[Errors, Errors]:
        leaf_ = draft.clone().requires_grad_()
        value = tv_overlap(leaf_, target, temperature=temperature, impl=name)
        value.sum().backward()
        grad = leaf_.grad.double()
        carried = (grad * under).sum(-1) * temperature / (q * under).sum(-1)
        by_row = value.detach() - alpha.detach(), carried - over_mass, (grad - leaf.grad).abs().amax(-1)
        return Errors(*(float(e.square().mean().sqrt()) for e in by_row)), Errors(
            *(float(e.abs().max()) for e in by_row)
        )

    own, reference = errors(impl), errors("reference")
    # The largest gradient is one token's: shared normaliser, exponential, S, scale and output each round it once.
    eps = max(torch.finfo(dtype).eps, 4 * 2**-23)
    rounding = Errors(4 * 2**-24, eps, eps * float(leaf.grad.abs().max()))
    return Verdict(own[0], reference[0], own[1], reference[1], rounding, ties)
