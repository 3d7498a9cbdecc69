"""The exact distribution of a policy's samples, by enumeration in float64, and the test of samples against it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bebop.backbone import load_backbone
from bebop.data.tokenizer import num_token_ids
from bebop.spec import ChainRule

LENGTH = 3  # tokens in the joint distribution


def load_policy(policy_dir: Path) -> Any:
    """The policy in transformers, in float64, without its heads; padding ids have probability 0."""
    return load_backbone(policy_dir, dtype=torch.float64).model


def conditionals(policy_dir: Path, prompt: Sequence[int], temperature: float) -> list[Tensor]:
    """[V], [V, V], [V, V, V] float64: distributions of token 1, of token 2 after each first, and of token 3 after each
    pair.

    Computed by transformers in float64. V: ids of the tokenizer.
    """
    model, size = load_policy(policy_dir), num_token_ids(policy_dir)
    rows = [[*prompt, *pair] for pair in itertools.product(range(size), repeat=LENGTH - 1)]
    with torch.no_grad():
        logits = model(torch.tensor(rows)).logits[:, -LENGTH:, :size]
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
    """p-value of `counts` under `probs`, degrees of freedom, and the number of samples where `probs` is 0.

    Cells with fewer than `smallest` expected samples are merged, least probable first. A sample of probability 0 makes
    the p-value 0.
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


def rule_output(target: Sequence[Tensor], draft: Sequence[Tensor], rule: ChainRule) -> Tensor:
    """[V, V, V] float64: the joint of the first three tokens under a chain rule, summed over every draft of three
    tokens and every outcome of its tests. Tokens after the rule's own are the target's.

    target: conditionals of the target as in `conditionals`; draft: [V], [V, V], [V, V, V] of the draft likewise.
    """
    size = target[0].shape[0]
    tokens = torch.cartesian_prod(*[torch.arange(size)] * LENGTH)  # [B, 3], every draft
    first, second, _ = tokens.T
    p, q = (torch.stack([t[0].expand(len(tokens), -1), t[1][first], t[2][first, second]], 1) for t in (target, draft))
    drawn = torch.nn.functional.one_hot(q.argmax(-1), size).to(p.dtype) if rule.draft == "argmax" else q
    chance = drawn.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).prod(1)  # [B], of this draft
    bonus = p[:, :1]  # any distribution: the token after three accepted drafts is not in the joint
    tests = rule.tests(torch.cat([p, bonus], 1), q, tokens, torch.full_like(first, LENGTH))
    emitted = torch.zeros((size,) * LENGTH, dtype=torch.float64)
    for outcome in itertools.product([True, False], repeat=LENGTH):
        passed = torch.tensor(outcome).expand(len(tokens), -1)
        mass = chance * torch.where(passed, tests.probability, 1 - tests.probability).prod(1)
        num = int(rule.num_accepted(passed)[0])
        if num == LENGTH:
            emitted.index_put_(tuple(tokens.T), mass, accumulate=True)
            continue
        after = rule.after_rejection(p[:, num], q[:, num], tokens[:, num], tests.weight[:, num])
        rows = (mass.unsqueeze(1) * after).reshape((size,) * LENGTH + (size,))
        rows = rows.sum(tuple(range(num, LENGTH)))  # [V] * num + [V]: accepted tokens and the one after them
        for table in target[num + 1 :]:
            rows = rows.unsqueeze(-1) * table
        emitted += rows
    return emitted
