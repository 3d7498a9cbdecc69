"""Which draft length pays at which batch size.

A step with k drafts emits AL(k) = 1 + sum_{j<=k} P(first j accepted) tokens per request and takes t(B, k), so that a
batch of B makes B * AL(k) / t(B, k) tokens/s. AL(k) is a property of heads and policy, t(B, k) of engine and machine:
few steps measure both. Pure functions.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bebop.errors import BadInput

MARGIN = 0.05  # shares below it are taken for nothing: t and AL are estimates some 5 % wide


class StepLike(Protocol):
    """What is read of `bebop.engines.protocol.Step`."""

    ended_s: float
    running: int
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class Window:
    """Steps in which the whole batch decoded and nothing else happened."""

    seconds: tuple[float, ...]  # of each step
    tokens: int

    @property
    def step_s(self) -> float:
        """Median step, s."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of these steps over their time."""
        return self.tokens / sum(self.seconds)


@dataclass(frozen=True)
class Choice:
    """The plan at one batch size. tokens_per_s: [K+1] predicted for k = 0..K by the speculating engine. pays: whether
    k promises the margin over plain decoding. reason: why this k, for people."""

    batch_size: int
    k: int
    tokens_per_s: tuple[float, ...]
    plain_tokens_per_s: float
    pays: bool
    reason: str

    @property
    def speedup(self) -> float:
        """Predicted, against the engine without speculation."""
        return self.tokens_per_s[self.k] / self.plain_tokens_per_s


def full_steps(steps: Sequence[StepLike], batch: int) -> Window:
    """The steps that began and ended with `batch` requests and prefilled nothing. Raises ValueError where none did."""
    pairs = [
        (before, after)
        for before, after in itertools.pairwise(steps)
        if before.running == after.running == batch and after.prompt_tokens == 0
    ]
    if not pairs:
        most = max((step.running for step in steps), default=0)
        raise BadInput(
            f"no step decoded {batch} requests together, {most} at most: raise rollout.max_num_seqs, "
            "rollout.kv_cache_gib or data.max_response_tokens, or lower bench.batch_sizes"
        )
    return Window(tuple(b.ended_s - a.ended_s for a, b in pairs), sum(b.tokens for _, b in pairs))


def acceptance(counts: Mapping[int, tuple[int, Sequence[int]]]) -> tuple[float, ...]:
    """[K] P(first j drafts accepted). counts: k -> (drafts of that length, [k] accepted at each depth), k = 1..K.

    A draft of k tokens counts for every j <= k, so all lengths are pooled. Raises ValueError if none was drafted.
    """
    rates = []
    for depth in range(1, max(counts) + 1):
        deep = [(drafts, accepted) for k, (drafts, accepted) in counts.items() if k >= depth]
        drafts = sum(n for n, _ in deep)
        if not drafts:
            raise BadInput(f"no draft of {depth} tokens was made")
        rates.append(sum(accepted[depth - 1] for _, accepted in deep) / drafts)
    return tuple(rates)


def acceptance_lengths(rates: Sequence[float]) -> tuple[float, ...]:
    """[K+1] AL(k) for k = 0..K from P(first j drafts accepted)."""
    return tuple(1.0 + math.fsum(rates[:k]) for k in range(len(rates) + 1))


def choose(
    step_s: Mapping[int, Sequence[float]], plain_s: Mapping[int, float], rates: Sequence[float], margin: float = MARGIN
) -> list[Choice]:
    """The k with most tokens/s at each batch size, if it is predicted to beat plain decoding and k = 0 by `margin`.

    Otherwise speculation does not pay and k is 0. Exception: if the speculating engine at k = 0 is itself more than
    `margin` slower than plain decoding, its fastest k is chosen.
    step_s: batch -> [K+1] step time at k = 0..K of the speculating engine; plain_s: batch -> step time without it.
    """
    lengths = acceptance_lengths(rates)
    choices = []
    for batch, times in sorted(step_s.items()):
        if len(times) != len(lengths):
            raise BadInput(
                f"{len(times)} step times at batch {batch}, expected {len(lengths)}, for k = 0..{len(rates)}"
            )
        speeds = tuple(batch * length / time for length, time in zip(lengths, times, strict=True))
        plain = batch / plain_s[batch]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        pays = best > 0 and speeds[best] >= (1.0 + margin) * max(plain, speeds[0])
        slow = speeds[0] < (1.0 - margin) * plain
        k = best if pays or slow else 0
        if pays:
            reason = f"k = {k} promises {speeds[k] / plain - 1:.0%} more than plain decoding"
        elif slow:
            reason = (
                f"no draft promises {margin:.0%} more than plain decoding, and k = 0 of the drafting engine is "
                f"{1 - speeds[0] / plain:.0%} below it: k = {k}, its fastest"
            )
        else:
            reason = f"no draft promises {margin:.0%} more than none: k = 0"
        choices.append(Choice(batch, k, speeds, plain, pays, reason))
    return choices


def verdict(choices: Sequence[Choice], schedule: str) -> str:
    """The advice, as one line; `schedule` as text. Gives the reason if a batch drafts without a gain."""
    if any(choice.pays for choice in choices):
        forced = [f"; at batch {c.batch_size} {c.reason}" for c in choices if c.k and not c.pays]
        return f"draft by {schedule}{''.join(forced)}"
    nowhere = "speculation does not pay at any of these batch sizes"
    if any(choice.k for choice in choices):
        return f"{nowhere}, so set rollout.speculation=none; an engine that speculates even so is fastest by {schedule}"
    return f"{nowhere}: k = 0, so set rollout.speculation=none"


def schedule(
    step_s: Mapping[int, Sequence[float]], plain_s: Mapping[int, float], rates: Sequence[float], margin: float = MARGIN
) -> dict[int, int]:
    """The k of every batch size from 1 to the largest measured, by `choose` on step times between the sizes measured.

    Step times between two measured sizes are interpolated linearly. Batches grow and shrink through all sizes, so
    keeping the k of a small size up to the next measured size would cost time there.
    """
    sizes = sorted(step_s)
    every = range(1, sizes[-1] + 1)
    between = {size: _between(step_s, sizes, size) for size in every}
    plain = {size: _between({n: (plain_s[n],) for n in sizes}, sizes, size)[0] for size in every}
    return {choice.batch_size: choice.k for choice in choose(between, plain, rates, margin)}


def _between(times: Mapping[int, Sequence[float]], sizes: Sequence[int], size: int) -> tuple[float, ...]:
    below = max((n for n in sizes if n <= size), default=sizes[0])
    above = min(n for n in sizes if n >= size)
    share = (size - below) / (above - below) if above > below else 0.0
    return tuple(a + share * (b - a) for a, b in zip(times[below], times[above], strict=True))


def floor_s(weights: Mapping[str, int], bytes_per_s: float, k: int, *, speculating: bool) -> float:
    """Time to read every weight that a step needs, once per pass, at the memory's speed.

    weights: bytes of "backbone" (what a target forward reads, lm_head with it), "heads" and "lm_head". A step with k
    drafts reads the backbone once and, k times, heads and lm_head; with k = 0 the heads once, to keep their keys.
    """
    drafting = k * (weights["heads"] + weights["lm_head"]) if k else weights["heads"] * speculating
    return (weights["backbone"] + drafting) / bytes_per_s
