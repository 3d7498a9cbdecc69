"""Grow draft trees level by level, over requests and nodes at once, and prune them to the budget.

Per expanded node, with q the draft's softmax over its `support` highest tokens and q_T the same tokens at the sampling
temperature, filters included (arXiv 2609.21827):

    leads   the m highest tokens                                        score factor q(x_i)
    probe   Y ~ qt = q_T / z outside the leads, z the q_T-mass there;   min(q(x_m), mass of q outside the leads),
            none if z = 0; for m = 0 it is the first child              m = 0: q(x_1)
    fills   the highest tokens that are neither, up to `width` slots    q(x)

A node's score is the product of the factors along its path. The `width` best nodes of a level are expanded, and the
`budget` best of all are kept. Ties go to the shallower node, then to the left one. The probe's factor does not depend
on Y and is at least that of any fill, and fills are to its right. So whether the probe is kept does not depend on which
token it is. Verifying it against qt needs this: if Y were ranked by its own q, the output would be biased.

Legend: B requests, W nodes expanded at this level, K width, S support, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from bebop_kernels import topk
from torch import Tensor

from bebop.errors import BadInput
from bebop.spec.random import StreamId, Streams, Uniforms, sample
from bebop.spec.sampling import SamplingFilters, Setting
from bebop.spec.tree.spec import NO_NODE, DraftTree, TreeBatch, TreeSpec

_ABSENT = -1.0  # score of a slot without a token; other scores are >= 0


@dataclass(frozen=True)
class Frontier:
    """The nodes to run the draft on next. At the root W = 1; tokens and parent_rows are 0 and not read.

    tokens long [B, W]; parent_rows long [B, W]: index of the parent in the previous frontier; valid bool [B, W]: if
    False, the logits are not read.
    """

    depth: int
    tokens: Tensor
    parent_rows: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Children:
    """Slots below each frontier node. tokens, is_probe, factors [B, W, K] (factor -1: no token); the rest [B, W, S]."""

    tokens: Tensor
    is_probe: Tensor
    factors: Tensor
    support_ids: Tensor
    probe_probs: Tensor


def children(
    logits: Tensor, valid: Tensor, spec: TreeSpec, draws: Uniforms, depth: int, *, filters: SamplingFilters
) -> Children:
    """Leads, probe and fills below each frontier node. logits [B, W, V], valid [B, W], filters' temperature [B]."""
    ranked, ids = _support(logits, valid, spec.support)
    size = ranked.shape[-1]
    # ranked by logits: rounding in the softmax must not change the order
    q = ranked.softmax(-1).cummin(-1).values
    rank = torch.arange(size, device=logits.device)
    slot = torch.arange(spec.width, device=logits.device)
    exists = slot < size
    at = slot.expand(*valid.shape, -1)  # the rank of the token in each slot
    factors, is_probe, probe_probs = None, torch.zeros_like(at, dtype=torch.bool), torch.zeros_like(q)
    if spec.method != "topk":
        leads = spec.leads_at(filters.temperature).reshape(-1, 1, 1)
        rest = torch.where(rank < leads, 0.0, filters(ranked))
        mass = rest.sum(-1, keepdim=True)
        probe_probs = rest / torch.where(mass > 0, mass, 1.0)
        probe = sample(rest, draws, StreamId.DRAFT, depth).unsqueeze(-1)
        has_probe = rest.gather(-1, probe) > 0
        is_probe = has_probe & (slot == leads) & exists
        fill = slot - 1 + (slot - 1 >= probe).long()  # fills are to the right of the probe and skip its rank
        at = torch.where(has_probe & (slot > leads), fill, torch.where(is_probe, probe, slot))
        last_lead = q.gather(-1, (leads - 1).clamp(min=0, max=size - 1).expand(*q.shape[:2], 1))
        off_leads = torch.where(rank < leads, 0.0, q).sum(-1, keepdim=True)  # a float sum is >= each of its terms
        factors = torch.where(leads == 0, last_lead, torch.minimum(last_lead, off_leads))
    at = at.clamp(max=size - 1)
    own = q.gather(-1, at)
    factors = own if factors is None else torch.where(is_probe, factors, own)
    return Children(ids.gather(-1, at), is_probe, torch.where(exists, factors, _ABSENT), ids, probe_probs)


class TreeGrower:
    """The trees of B requests in one round.

        grower = TreeGrower(spec, draws, temperature=[B])
        for _ in range(spec.depth):
            grower.expand(heads(grower.frontier))       # logits [B, W, V]
        trees = grower.finish()

    temperature and filters (top_k, top_p, min_p): the target's, one number or [B].
    """

    def __init__(
        self,
        spec: TreeSpec,
        draws: Uniforms,
        *,
        temperature: Setting,
        **filters: Setting,
    ) -> None:
        self.spec, self.draws = spec, draws
        self._temperature, self._filters = temperature, filters
        self.frontier: Frontier | None = Frontier(0, *(torch.zeros(1, 1, dtype=torch.long),) * 2, torch.ones(1, 1) > 0)
        self._levels: list[dict[str, Tensor]] = []
        self._num_candidates = 0
        self._frontier_ids = self._frontier_scores = torch.zeros(0)

    def expand(self, logits: Tensor) -> None:
        """Add the level below the frontier and choose the next one. logits [B, W, V], of the frontier's nodes."""
        frontier, spec = self.frontier, self.spec
        if frontier is None:
            raise BadInput(f"logits: got a level below depth {spec.depth}, expected {spec.depth} levels")
        width = frontier.tokens.shape[1]
        if logits.ndim != 3 or logits.shape[1] != width or not logits.is_floating_point() or 0 in logits.shape:
            got = f"{logits.dtype} {list(logits.shape)}"
            raise BadInput(f"logits: got {got}, expected floats [B, W, V] with W = {width}")
        batch = logits.shape[0]
        if not self._levels:
            frontier = self._start(logits)
        elif batch != frontier.valid.shape[0]:
            raise BadInput(f"logits: got {batch} requests, expected {frontier.valid.shape[0]}")
        elif logits.shape[-1] != self._vocab_size:
            raise BadInput(f"logits: got V = {logits.shape[-1]}, expected {self._vocab_size} as before")
        valid = frontier.valid
        below = children(logits, valid, spec, self.draws, frontier.depth, filters=self._sampling)

        factors = torch.where(valid.unsqueeze(-1), below.factors, _ABSENT)
        scores = torch.where(factors >= 0, self._frontier_scores.unsqueeze(-1) * factors, _ABSENT).flatten(1)
        parents = self._frontier_ids.unsqueeze(-1).expand_as(below.tokens).flatten(1)
        level = {"scores": scores, "tokens": below.tokens.flatten(1), "parents": parents}
        level |= {"is_probe": below.is_probe.flatten(1), "owners": self._frontier_ids}
        level |= {"support_ids": below.support_ids, "probe_probs": below.probe_probs}
        self._levels.append(level)
        first = self._num_candidates
        self._num_candidates += scores.shape[1]
        if frontier.depth + 1 == spec.depth:
            self.frontier = None
            return
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : spec.width].sort(dim=1).values
        chosen = scores.gather(1, best)
        tokens = level["tokens"].gather(1, best)
        self.frontier = Frontier(frontier.depth + 1, tokens, best // spec.width, chosen >= 0)
        self._frontier_ids, self._frontier_scores = best + first, chosen

    def finish(self) -> TreeBatch:
        """The `budget` best nodes of each request, parents first."""
        if self.frontier is not None:
            raise BadInput(f"finish: got {len(self._levels)} expanded levels, expected {self.spec.depth}")

        def joined(name: str) -> Tensor:
            return torch.cat([level[name] for level in self._levels], dim=1)

        scores = joined("scores")
        batch, num = scores.shape
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.spec.budget]
        # candidates are counted by level, then left to right; absent ones come last
        best = torch.where(scores.gather(1, best) >= 0, best, best + num).sort(dim=1).values
        present = best < num
        best = best % num
        place = torch.arange(best.shape[1], device=best.device).expand(batch, -1)
        node_of = best.new_full((batch, num + 1), NO_NODE)  # index: candidate + 1; 0 is the root
        node_of.scatter_(1, best + 1, torch.where(present, place, NO_NODE))
        counts = [level["scores"].shape[1] for level in self._levels]
        depths = torch.repeat_interleave(torch.arange(1, len(counts) + 1), torch.tensor(counts)).to(best.device)

        owners = joined("owners")
        family_of = best.new_full((batch, num + 1), NO_NODE)
        family_of.scatter_(1, owners + 1, torch.arange(owners.shape[1], device=best.device).expand(batch, -1))
        family = torch.where(present, family_of.gather(1, best + 1), NO_NODE)
        return TreeBatch(
            method=self.spec.method,
            tokens=torch.where(present, joined("tokens").gather(1, best), -1),
            parents=torch.where(present, node_of.gather(1, joined("parents").gather(1, best) + 1), NO_NODE),
            depths=torch.where(present, depths[best], 0),
            is_probe=present & joined("is_probe").gather(1, best),
            scores=scores.gather(1, best),
            family=torch.cat([family_of[:, :1], family], dim=1),
            support_ids=joined("support_ids"),
            probe_probs=joined("probe_probs"),
        )

    def _start(self, logits: Tensor) -> Frontier:
        """The root as the frontier of B requests."""
        batch, device, self._vocab_size = logits.shape[0], logits.device, logits.shape[-1]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        temperature = torch.as_tensor(self._temperature, dtype=dtype, device=device)
        if temperature.shape not in ((), (batch,)):
            raise BadInput(f"temperature: got {list(temperature.shape)}, expected a number or [B] = [{batch}]")
        self._sampling = SamplingFilters(temperature=temperature.expand(batch), **self._filters)
        self._frontier_ids = torch.full((batch, 1), NO_NODE, device=device)
        self._frontier_scores = torch.ones(batch, 1, dtype=dtype, device=device)
        zero = torch.zeros(batch, 1, dtype=torch.long, device=device)
        return Frontier(0, zero, zero, zero == 0)


def grow_tree(
    draft_fn: Callable[[list[tuple[int, ...]]], Tensor],
    spec: TreeSpec,
    *,
    temperature: float,
    generator: torch.Generator | None = None,
    **filters: float,
) -> DraftTree:
    """Draft the tree of one request, level by level, pruned to the budget.

    draft_fn: one tuple of token ids per node to expand, from below the root to the node -> the draft's logits [n, V]
    after each. Called once per level, first with [()]. filters: the target's top_k, top_p, min_p.
    Raises ValueError, which names the argument, as TreeGrower does.
    """
    grower = TreeGrower(spec, Streams.from_generator(generator, 1), temperature=temperature, **filters)
    paths: list[tuple[int, ...]] = [()]
    while (frontier := grower.frontier) is not None:
        keep = frontier.valid[0].nonzero().squeeze(1)
        expanded = [paths[i] for i in keep.tolist()]
        logits = draft_fn(expanded)
        if logits.ndim != 2 or logits.shape[0] != len(expanded):
            raise BadInput(f"draft_fn: got logits {list(logits.shape)}, expected [n, V] with n = {len(expanded)}")
        full = logits.new_zeros(len(paths), logits.shape[1])
        full[keep] = logits
        grower.expand(full.unsqueeze(0))
        if grower.frontier is None:
            break
        rows, tokens = grower.frontier.parent_rows[0].tolist(), grower.frontier.tokens[0].tolist()
        paths = [(*paths[row], token) for row, token in zip(rows, tokens, strict=True)]
    return grower.finish().row(0)


def _support(logits: Tensor, valid: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The highest logits and their ids, [B, W, S], by (logit, then lowest id); all 0 where not valid."""
    values, ids = topk(logits.flatten(0, 1), min(size, logits.shape[-1]))
    values, ids = values.unflatten(0, valid.shape), ids.unflatten(0, valid.shape)
    values = torch.where(valid.unsqueeze(-1), values, 0.0)
    bad = ~torch.isfinite(values[..., 0])  # NaN comes first
    if bool(bad.any()):
        row, node = (int(i) for i in bad.nonzero()[0])
        raise BadInput(f"logits: NaN or no finite value in request {row}, frontier node {node}; expected logits")
    return values, ids
