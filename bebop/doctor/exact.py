"""What a policy samples, exactly: joints by enumeration in float64, and the test of samples against them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bebop.backbone import load_backbone
from bebop.spec import acceptance_ratio, residual

LENGTH = 3  # tokens of the joint


def load_policy(policy_dir: Path) -> Any:
    """The policy as transformers computes it, in float64, its heads left out."""
    return load_backbone(policy_dir, dtype=torch.float64).model


def conditionals(policy_dir: Path, prompt: Sequence[int], temperature: float) -> list[Tensor]:
    """[V], [V, V], [V, V, V] float64: of token 1, of token 2 after each first, of token 3 after each pair.

    From the checkpoint's own logits, by transformers, in float64.
    """
    model = load_policy(policy_dir)
    size = model.config.vocab_size
    rows = [[*prompt, *pair] for pair in itertools.product(range(size), repeat=LENGTH - 1)]
    with torch.no_grad():
        logits = model(torch.tensor(rows)).logits[:, -LENGTH:]
    probs = torch.softmax(logits / temperature, dim=-1).view(size, size, LENGTH, size)
    return [probs[0, 0, 0], probs[:, 0, 1], probs[:, :, 2]]


def joint(policy_dir: Path, prompt: Sequence[int], temperature: float) -> np.ndarray:
    """[V, V, V] float64: probability of each first three tokens."""
    first, second, third = conditionals(policy_dir, prompt, temperature)
    return (first[:, None, None] * second[:, :, None] * third).numpy()


def tally(samples: Iterable[Sequence[int]], size: int) -> np.ndarray:
    """[V, V, V] counts of the first three tokens of each sample."""
    counts = np.zeros((size,) * LENGTH, dtype=np.int64)
    for tokens in samples:
        counts[tuple(tokens[:LENGTH])] += 1
    return counts


def chi_square(counts: np.ndarray, probs: np.ndarray, smallest: float = 5.0) -> tuple[float, int, int]:
    """p-value that `counts` were drawn from `probs`, degrees of freedom, and samples where `probs` is 0.

    Cells that expect fewer than `smallest` samples are merged, least probable first. A sample that cannot be makes the
    p-value 0.
    """
    from scipy.stats import chi2

    total = counts.sum()
    impossible = int(counts[probs <= 0].sum())
    order = np.argsort(probs, axis=None)
    expected, observed = total * probs.reshape(-1)[order], counts.reshape(-1)[order]
    merged: list[list[float]] = []
    for e, o in zip(expected, observed, strict=True):
        if merged and merged[-1][0] < smallest:
            merged[-1][0] += e
            merged[-1][1] += o
        else:
            merged.append([e, o])
    statistic = sum((o - e) ** 2 / e for e, o in merged if e > 0)
    freedom = len(merged) - 1
    return (0.0 if impossible else float(chi2.sf(statistic, freedom)), freedom, impossible)


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return float(0.5 * np.abs(a - b).sum())


def rule_output(target: Sequence[Tensor], draft: Sequence[Tensor], rule: str) -> Tensor:
    """[V, V, V] float64: the joint that a chain rule emits, over every draft and every acceptance.

    target: conditionals of the target as in `conditionals`; draft: [V], [V, V], [V, V, V] of the draft likewise.
    Draft i is accepted with min(1, p/q); the token of the first rejection comes from the residual, and those behind it
    from the target.
    """
    size = target[0].shape[0]
    accepted, rejected = [], []
    for p, q in zip(target, draft, strict=True):
        drawn = torch.nn.functional.one_hot(q.argmax(-1), size).to(p.dtype) if rule == "target_only" else q
        accepted.append(drawn * acceptance_ratio(p, drawn))
        rejected.append((1 - accepted[-1].sum(-1, keepdim=True)) * residual(p, drawn))
    third = accepted[2] + rejected[2]
    second = accepted[1][:, :, None] * third + rejected[1][:, :, None] * target[2]
    behind_rejection = target[1][:, :, None] * target[2]
    return accepted[0][:, None, None] * second + rejected[0][:, None, None] * behind_rejection
