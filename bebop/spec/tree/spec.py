"""Draft trees: shape and records. grow.py grows them, verify.py verifies them.

Rheo: RheoSampling (arXiv 2609.21827). TopK: EAGLE-2/3's dynamic tree (arXiv 2406.16858, 2503.01840), Rheo's tree
without a probe. RRSw: Rheo's tree, but the leads are verified before the probe. A tree of width 1 is a chain: "rheo"
drafts it by sampling (rejection sampling), "topk" by argmax (target-only).

Legend: B requests, N nodes (at most the budget), F families (an expanded node and its children; the root's is first),
S support, V vocabulary. Nodes are numbered from 0, parents before children, then left before right. The root is not a
node; its number is -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bebop.errors import BadInput

Method = Literal["topk", "rheo", "rrsw"]
NO_NODE = -1
# leads="auto": m = 1 above this temperature, else m = 0, which at temperature 0 is TopK. Scored gains over TopK:
#   tiny policy (4 wide, 8 deep, 10 nodes, 96 prompts)
#     m = 1: -0.011 +- 0.011 at T = 0.3, +0.043 +- 0.012 at 0.7
#     m = 0: +0.100 at 0.3, +0.133 at 0.7
#   SmolLM2 (10 wide, 60 nodes, 80 positions)
#     m = 1: -0.076 +- 0.028 at 0.3, +0.212 +- 0.062 at 0.7, +0.177 +- 0.037 at 1
#     m = 0: -0.018 +- 0.040 at 0.3, +0.068 +- 0.077 at 0.7, +0.213 +- 0.076 at 1
AUTO_LEADS_ABOVE = 0.5


@dataclass(frozen=True)
class TreeSpec:
    """Shape of a draft tree. All lengths in tokens or nodes."""

    method: Method = "rheo"
    width: int = 10  # children per expanded node, and nodes expanded per level
    depth: int = 8  # levels
    budget: int = 60  # nodes kept
    leads: int | Literal["auto"] = "auto"  # m: deterministic children before the probe; not read for topk
    support: int = 128  # draft tokens considered per node

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise BadInput(f"method={self.method!r}: expected one of {', '.join(get_args(Method))}")
        for name in ("width", "depth", "budget", "support"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"{name}={value!r}: expected an integer, at least 1")
        if self.leads == "auto":
            return
        if not isinstance(self.leads, int) or isinstance(self.leads, bool) or not 0 <= self.leads < self.width:
            most = self.width - 1
            raise BadInput(f"leads={self.leads!r}: expected 'auto' or an integer in [0, width - 1] = [0, {most}]")

    def leads_at(self, temperature: Tensor) -> Tensor:
        """m of each request: long, with temperature's shape."""
        if self.leads != "auto":
            return torch.full_like(temperature, self.leads, dtype=torch.int64)
        return (temperature > AUTO_LEADS_ABOVE).long().clamp(max=self.width - 1)


@dataclass(frozen=True)
class TreeBatch:
    """B trees of at most N nodes; a row with fewer is padded with token -1 at its end.

    tokens, parents, depths long [B, N]: depth 1 below the root. is_probe bool [B, N]. scores [B, N]: path scores.
    family long [B, N+1]: number of the family below the root, then below each node; -1 if the node was not expanded.
    support_ids long [B, F, S] and probe_probs [B, F, S]: the distribution qt from which the family's probe was drawn, 0
    on leads; all 0 in a family without a probe.
    """

    method: Method
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    is_probe: Tensor
    scores: Tensor
    family: Tensor
    support_ids: Tensor
    probe_probs: Tensor

    def ancestors(self) -> Tensor:
        """bool [B, N, N]: [b, i, j] is True if j is i or an ancestor of i. The tree part of the target's mask."""
        row = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        mask = (row == row.unsqueeze(1)).expand(*self.tokens.shape, -1)
        above = self.parents
        for _ in range(int(self.depths.max()) - 1):
            mask = mask | (above.unsqueeze(-1) == row)
            above = torch.where(above >= 0, self.parents.gather(1, above.clamp(min=0)), NO_NODE)
        return mask

    def row(self, index: int) -> DraftTree:
        """The tree of one request, without padding."""
        size = int((self.tokens[index] >= 0).sum())
        return DraftTree(
            method=self.method,
            tokens=self.tokens[index, :size],
            parents=self.parents[index, :size],
            depths=self.depths[index, :size],
            is_probe=self.is_probe[index, :size],
            scores=self.scores[index, :size],
            family=self.family[index, : size + 1],
            support_ids=self.support_ids[index],
            probe_probs=self.probe_probs[index],
        )


@dataclass(frozen=True)
class DraftTree:
    """One request's tree: the fields of TreeBatch without their first axis, n nodes."""

    method: Method
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    is_probe: Tensor
    scores: Tensor
    family: Tensor
    support_ids: Tensor
    probe_probs: Tensor

    def batch(self) -> TreeBatch:
        tensors = (value.unsqueeze(0) for value in vars(self).values() if isinstance(value, Tensor))
        return TreeBatch(self.method, *tensors)


@dataclass(frozen=True)
class TreeResult:
    """tokens long [L]: the accepted path and one more token. path long [L-1]: the accepted nodes, from the root."""

    tokens: Tensor
    path: Tensor
