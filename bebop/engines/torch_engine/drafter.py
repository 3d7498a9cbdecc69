"""Drafts of a round: none, a chain, or a tree, made by the MTP head level by level.

At depth k the head attends to the depth-1 keys of every position up to its anchor, which are in the head's cache, and
to the keys of depths 2..k on its own path. A draft writes these after the others, and the next draft overwrites them
(`bebop.mtp.head`).

Legend: B requests, N nodes, D levels, W nodes expanded at a level, V vocabulary, S width of the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from bebop.config import RolloutSection
from bebop.engines.torch_engine.kv_cache import Cache, Window, fold
from bebop.engines.torch_engine.model import Policy
from bebop.engines.torch_engine.profiling import RoundClock
from bebop.spec import (
    RULES,
    StreamId,
    TreeBatch,
    TreeGrower,
    TreeSpec,
    TreesResult,
    Uniforms,
    sample,
    verify_chain,
    verify_trees,
)
from bebop.spec.sampling import SamplingFilters, Setting

NO_NODE = -1


@dataclass(frozen=True)
class Anchors:
    """The requests of a round. lengths: known tokens, [B]; the last one is not in the cache yet.

    state [B, S]: the head's output of depth 1 at the last token. committed: bool [B, start], the columns of each
    request's text in both caches; None: all columns. start: the first column after all texts.
    """

    lengths: Tensor
    state: Tensor | None
    committed: Tensor | None
    start: int


@dataclass(frozen=True)
class Verified:
    """tokens [B, D+1]: accepted draft tokens and one more, then -1. path [B, D]: accepted nodes, then -1.

    probs [B, D+1]: probability of each token under the distribution from which it was sampled.
    """

    tokens: Tensor
    path: Tensor
    probs: Tensor

    @property
    def rows(self) -> Tensor:
        """[B, D+1]: the row of the target pass that each token was sampled from."""
        return torch.nn.functional.pad((self.path + 1).clamp(min=0), (1, 0))


class Draft(Protocol):
    """Nodes of B requests, and how to verify them. tokens, depths [B, N]: padded with token -1 and depth 0.

    bad: bool [B], requests whose states were not finite at some depth and were set to 0 there; None: not drafted.
    """

    tokens: Tensor
    depths: Tensor
    bad: Tensor | None

    def seen(self) -> Tensor:
        """bool [B, N, N]: the nodes that each node attends to: itself and its ancestors."""

    def verify(self, logits: Tensor, settings: Settings, draws: Uniforms) -> Verified:
        """logits [B, N+1, V] of the target, row 0 after the root."""


@dataclass(frozen=True)
class Settings:
    """Sampling settings of B requests; filters only if a request uses them."""

    temperature: Tensor
    filters: dict[str, Setting]

    @cached_property
    def sampling(self) -> SamplingFilters:
        return SamplingFilters(temperature=self.temperature, **self.filters)


@dataclass(frozen=True)
class Chain:
    """A chain of K draft tokens; K = 0 is plain decoding. probs [B, K, V]: their distributions; None: argmax drafts."""

    tokens: Tensor
    depths: Tensor
    probs: Tensor | None
    rule: str
    bad: Tensor | None = None

    def seen(self) -> Tensor:
        size = self.tokens.shape[1]
        return (
            torch.ones(size, size, dtype=torch.bool, device=self.tokens.device).tril().expand(len(self.tokens), -1, -1)
        )

    def verify(self, logits: Tensor, settings: Settings, draws: Uniforms) -> Verified:
        target = settings.sampling(logits)
        result = verify_chain(target, self.probs, self.tokens, rule=self.rule, draws=draws)
        place = torch.arange(self.tokens.shape[1], device=logits.device)
        path = torch.where(place < result.num_accepted.unsqueeze(1), place, NO_NODE)
        probs = target.gather(-1, result.tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return Verified(result.tokens, path, probs)


@dataclass(frozen=True)
class Tree:
    """Draft trees of bebop.spec."""

    trees: TreeBatch
    bad: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        return self.trees.tokens

    @property
    def depths(self) -> Tensor:
        return self.trees.depths

    def seen(self) -> Tensor:
        return self.trees.ancestors()

    def verify(self, logits: Tensor, settings: Settings, draws: Uniforms) -> Verified:
        batch = torch.arange(len(logits), device=logits.device)
        rows: list[Tensor] = []

        def target(at: Tensor) -> Tensor:
            rows.append(settings.sampling(logits[batch, at]))
            return rows[-1]

        result: TreesResult = verify_trees(self.trees, target, draws=draws)
        tokens, path = result.tokens[:, : len(rows)], result.path[:, : len(rows) - 1]
        chosen = [p.gather(1, t.clamp(min=0)) for p, t in zip(rows, tokens.split(1, dim=1), strict=True)]
        return Verified(tokens, path, torch.cat(chosen, dim=1))


class Drafter:
    """Makes the drafts that a rollout section describes."""

    def __init__(self, rollout: RolloutSection, policy: Policy) -> None:
        self.policy, self.rule, self.speculating = policy, rollout.rule, rollout.speculation == "mtp"
        self.depth = rollout.draft_depth
        self.clock = RoundClock()
        self.spec: TreeSpec | None = None
        if rollout.tree != "none":
            self.spec = TreeSpec(
                method=rollout.tree,
                width=rollout.tree_width,
                depth=rollout.tree_depth,
                budget=rollout.tree_budget,
                leads=rollout.tree_leads,
                support=rollout.tree_support,
            )

    @property
    def max_nodes(self) -> int:
        """Number of nodes of the largest draft."""
        return self.depth if self.spec is None else self.spec.budget

    @property
    def max_own_columns(self) -> int:
        """Number of columns that a draft writes to the head's cache."""
        return self.depth if self.spec is None else self.spec.width * self.depth

    def sizes(self) -> dict[StreamId, tuple[int, int]]:
        """Numbers of random numbers that a round uses, for RoundDraws."""
        own = {StreamId.ACCEPT: (self.depth + 1, 1), StreamId.FINAL: (self.depth + 1, 1)}
        if not self.speculating:
            return {StreamId.FINAL: (1, 1)}
        width = 1 if self.spec is None else self.spec.width
        if self.spec is not None and self.spec.method == "rrsw":
            own[StreamId.LEAD] = (self.depth + 1, 1)
        return own | {StreamId.DRAFT: (self.depth, width)}

    def nothing(self, batch: int) -> Chain:
        """An empty draft: for plain decoding, and for the first token after a prompt."""
        none = torch.zeros(batch, 0, dtype=torch.long, device=self.policy.device)
        return Chain(none, none, None, "target_only")

    def draft(self, anchors: Anchors, settings: Settings, draws: Uniforms, cache: Cache | None) -> Draft:
        """The drafts of a round; cache: the head's, with depth-1 keys of every committed position."""
        if not self.speculating or cache is None:
            return self.nothing(len(anchors.lengths))
        with self.clock.part("drafting"):
            if self.spec is not None:
                return self._tree(self.spec, anchors, settings, draws, cache)
            return self._chain(anchors, settings, draws, cache)

    def _chain(self, anchors: Anchors, settings: Settings, draws: Uniforms, cache: Cache) -> Chain:
        state, tokens, probs, bad = anchors.state.unsqueeze(1), [], [], _none_bad(anchors)
        for depth in range(self.depth):
            if depth:
                own = None
                if anchors.committed is not None:
                    own = torch.ones(len(state), 1, depth, dtype=torch.bool, device=state.device)
                state = self._deeper(state, tokens[-1].unsqueeze(1), depth, anchors, own, depth - 1, cache)
                _isolate(state, bad)
            logits = self._logits(state[:, 0])
            if RULES[self.rule].draft == "argmax":
                tokens.append(logits.argmax(-1))
                continue
            probs.append(settings.sampling(logits))
            tokens.append(sample(probs[-1], draws, StreamId.DRAFT, depth))
        drafted = torch.stack(tokens, 1)
        depths = torch.arange(1, self.depth + 1, device=drafted.device).expand_as(drafted)
        return Chain(drafted, depths, torch.stack(probs, 1) if probs else None, self.rule, bad)

    def _tree(self, spec: TreeSpec, anchors: Anchors, settings: Settings, draws: Uniforms, cache: Cache) -> Tree:
        grower = TreeGrower(spec, draws, temperature=settings.temperature, **settings.filters)
        states, own, used, bad = anchors.state.unsqueeze(1), None, 0, _none_bad(anchors)
        grower.expand(self._logits(states))
        while (frontier := grower.frontier) is not None:
            batch, width = frontier.tokens.shape
            parents = frontier.parent_rows.unsqueeze(-1)
            states = states.gather(1, parents.expand(-1, -1, states.shape[-1]))
            itself = torch.eye(width, dtype=torch.bool, device=states.device).expand(batch, -1, -1)
            own = itself if own is None else torch.cat([own.gather(1, parents.expand(-1, -1, used)), itself], -1)
            states = self._deeper(states, frontier.tokens, frontier.depth, anchors, own, used, cache)
            _isolate(states, bad)
            used += width
            grower.expand(self._logits(states))
        return Tree(grower.finish(), bad)

    def _deeper(
        self, states: Tensor, tokens: Tensor, depth: int, anchors: Anchors, own: Tensor | None, used: int, cache: Cache
    ) -> Tensor:
        """Run the head on draft tokens of `depth`: states [B, W, S] of their parents, tokens [B, W] -> [B, W, S]."""
        positions = (anchors.lengths + (depth - 2)).unsqueeze(1).expand_as(tokens)
        start = anchors.start + used
        mask = fold(anchors.committed, own, anchors.start, self.policy.groups, self.policy.dtype)
        with self.clock.part("draft_passes"):
            return self.policy.draft_state(states, tokens, positions, Window(cache, 0, start, mask))

    def _logits(self, states: Tensor) -> Tensor:
        with self.clock.part("draft_passes"):
            return self.policy.draft_logits(states)


def _none_bad(anchors: Anchors) -> Tensor:
    return torch.zeros(len(anchors.lengths), dtype=torch.bool, device=anchors.lengths.device)


def _isolate(states: Tensor, bad: Tensor) -> None:
    """Mark in bad [B] the requests whose states [B, W, S] are not finite, and set these states to 0."""
    bad |= ~torch.isfinite(states.sum((1, 2)))
    if bool(bad.any()):
        states[bad] = 0
