"""The frozen records that pass between stages. Only the standard library and bebop's errors: every stage imports this.

Shapes and units are on every field; entropies are in nats, times in seconds, log-probabilities natural.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from bebop.errors import BadInput

_FLOAT32 = (2.0**-150, 3.4e38)  # numbers between these are neither 0 nor infinite in float32


@dataclass(frozen=True)
class Prompt:
    """One task instance: what the policy sees and what its verifier needs to score an answer."""

    prompt_id: str  # unique and stable over runs: "<task>/<seed>/<index>"
    task: str  # name of the task in bebop.data.tasks, the key of its verifier
    text: str  # the user's turn, before any chat template
    solution: str | None = None  # a worked solution (steps, then the answer), where the task can write one
    entry: Mapping[str, Any] = field(default_factory=dict)  # what the verifier needs, JSON-serialisable


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. Draft and target use the same values.

    Raises BadInput naming the parameter, what it got and what it expected.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 256
    seed: int | None = None
    logprobs: bool = True  # log-probability of every emitted token at the sampling temperature
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # continue to max_tokens

    def __post_init__(self) -> None:
        for name, (fits, expected) in _SAMPLING.items():
            value = getattr(self, name)
            if not fits(value):
                shown = " ".join(repr(value).split())[:80]
                raise BadInput(f"sampling parameter {name}={shown}: expected {expected}")


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


_SAMPLING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: _number(v) and 0.0 <= v < _FLOAT32[1], "a number at least 0, finite in float32"),
    "top_p": (lambda v: _number(v) and _FLOAT32[0] < v <= 1.0, "a number in (0, 1], above 0 in float32"),
    "top_k": (lambda v: _whole(v) and v >= 0, "an integer, at least 1, or 0 for off"),
    "max_tokens": (lambda v: _whole(v) and v >= 1, "an integer, at least 1"),
    "seed": (lambda v: v is None or (_whole(v) and -(2**63) <= v < 2**63), "a signed 64-bit integer, or None"),
    "logprobs": (lambda v: isinstance(v, bool), "True or False"),
    "stop_token_ids": (lambda v: isinstance(v, tuple) and all(map(_whole, v)), "a tuple of token ids"),
    "ignore_eos": (lambda v: isinstance(v, bool), "True or False"),
}


@dataclass(frozen=True)
class DraftCounts:
    """Raw counters of speculative decoding. Ratios are computed from these, and never stored without them."""

    num_drafts: int = 0  # target forwards that carried a draft
    num_draft_tokens: int = 0
    accepted_per_depth: tuple[int, ...] = ()  # [K] draft tokens accepted at depth 1..K (depth j implies 1..j-1)
    mixed_lengths: bool = False  # drafts of several lengths on purpose, by rollout.draft_schedule

    def __add__(self, other: DraftCounts) -> DraftCounts:
        width = max(len(self.accepted_per_depth), len(other.accepted_per_depth))
        pad = [tuple(c.accepted_per_depth) + (0,) * (width - len(c.accepted_per_depth)) for c in (self, other)]
        return DraftCounts(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            tuple(a + b for a, b in zip(*pad, strict=True)),
            self.mixed_lengths or other.mixed_lengths,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Pooled tokens per target forward, 1 + accepted / drafts; None if nothing was drafted."""
        return 1.0 + sum(self.accepted_per_depth) / self.num_drafts if self.num_drafts else None

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """[K] P(depth j accepted | depth j-1 accepted); None if depth j-1 was never accepted, or if it is not known.

        With mixed draft lengths, it is not known how many of the drafts accepted to depth j-1 had a token at depth j.
        """
        reached = (self.num_drafts, *self.accepted_per_depth[:-1])
        if self.mixed_lengths:
            reached = (self.num_drafts, *(0 for _ in self.accepted_per_depth[:-1]))
        return tuple(a / n if n else None for a, n in zip(self.accepted_per_depth, reached, strict=False))


@dataclass(frozen=True)
class Rollout:
    """One finished (or aborted) response."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # one per token, at the sampling temperature
    finish_reason: str  # "stop" | "length" | "abort"
    versions: tuple[int, ...]  # policy version that sampled each token, one per token
    counts: DraftCounts | None = None  # None: the engine did not speculate


@dataclass(frozen=True)
class WeightChecksums:
    """Checksums of what an engine or a trainer holds, over float32 bytes in name order (bebop.mtp.checksum)."""

    backbone: str
    heads: str
    num_head_tensors: int


@dataclass(frozen=True)
class StepRecord:
    """One RL step for the monitor; a line of metrics.jsonl with kind == "step".

    entropy_nats: mean target entropy over emitted response tokens, at the sampling temperature.
    acceptance_length: pooled over the step's requests, 1 + accepted / drafts; None if nothing was drafted. An
        imported step without counts has the mean of the requests' own ratios.
    """

    step: int
    entropy_nats: float | None
    counts: DraftCounts | None
    num_speculative_tokens: int  # of a tree: its depth
    acceptance_rule: str  # "rejection" | "target_only" | "block" | a tree's method and shape
    temperature: float
    reward_mean: float | None = None
    zero_spread_groups: float | None = None  # share of groups whose rewards are all equal
    staleness_mean: float | None = None  # policy versions between sampling and training, per sample
    staleness_max: float | None = None
    tokens_per_s: float | None = None
    acceptance_length_mean_of_requests: float | None = None  # mean of per-request ratios, verl's definition
    response_length_mean: float | None = None
    probs_diff_max: float | None = None  # rollout against trainer probabilities
    backbone_checksum: str | None = None
    heads_checksum_trainer: str | None = None
    heads_checksum_engine: str | None = None
    step_s: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float | None:
        return self.counts.acceptance_length if self.counts else self.acceptance_length_mean_of_requests
