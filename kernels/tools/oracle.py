"""Errors of an implementation against a float64 oracle on the same rounded inputs, beside the reference's errors.

If p and q of a token are too close for float32, either side of q > p may result, and its gradient changes by q. Such
ties are removed from the vocabulary (their logits set to -inf in both rows) and counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from bebop_kernels.overlap import naive, tv_overlap

TIE_BAND = 1e-4  # in ln q - ln p; float32 logits of size 10 are exact to 1e-6
ROWS = 128  # enough for a stable mean


class Errors(NamedTuple):
    """Errors of alpha, of S (recovered from the gradient of the tokens with q <= p), and of the gradient."""

    alpha: float
    over_mass: float
    gradient: float


class Verdict(NamedTuple):
    """Errors of an implementation and of the reference: root mean squares over rows, and the largest.

    The gradient error of a row is its largest over tokens.
    """

    own: Errors
    reference: Errors
    own_worst: Errors
    reference_worst: Errors
    rounding: Errors  # what a few roundings cause in a correct result; the reference may do better by chance
    ties: int

    @property
    def holds(self) -> bool:
        """True if mean errors are at most twice the reference's, and largest errors too unless within rounding."""
        means = zip(self.own, self.reference, strict=True)
        worst = zip(self.own_worst, self.reference_worst, self.rounding, strict=True)
        return all(own <= 2 * reference for own, reference in means) and all(
            own <= max(2 * reference, rounding) for own, reference, rounding in worst
        )


def logits_pair(
    rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, noise: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Draft and target logits [rows, V] without ties, and how many ties were removed."""
    generator = torch.Generator().manual_seed(vocab_size)
    target = torch.randn(rows, vocab_size, generator=generator) * 3
    draft = target + noise * torch.randn(rows, vocab_size, generator=generator)
    draft, target = draft.to(dtype), target.to(dtype)
    ties = 0
    # Removing ties changes the normalisers, which may cause new ties.
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
    # The largest gradient belongs to one token: normaliser, exponential, S, scale and output round it once each.
    eps = max(torch.finfo(dtype).eps, 4 * 2**-23)
    rounding = Errors(4 * 2**-24, eps, eps * float(leaf.grad.abs().max()))
    return Verdict(own[0], reference[0], own[1], reference[1], rounding, ties)
