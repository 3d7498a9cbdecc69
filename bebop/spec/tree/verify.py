"""Verify a batch of draft trees so that the emitted tokens are distributed exactly as the target.

At a node with target p, walking down from the root (arXiv 2609.21827):

    the probe Y was kept            accept it with min(1, p(Y) / qt(Y)), where Y was drawn from qt; after a rejection
                                    r = norm(max(0, p - qt))
    it was pruned, or there is none r = p
    then                            draw y ~ r: descend if y is another kept child, else emit y and stop

TopK's first child counts as a probe drawn from a point mass: accepted with p(x_1), then r = norm(p without x_1). So a
TopK tree of width 1 uses its random numbers as the target-only chain does.

Drawing y is the same as trying those children one by one with r(child). RRSw first draws y ~ p. If y is a lead, it
descends; otherwise p := norm(p without the leads), and the steps above follow.

Legend: B requests, N nodes, D levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.spec import distributions
from bebop.spec.random import StreamId, Streams, Uniforms, invert, sample
from bebop.spec.tree.spec import NO_NODE, DraftTree, TreeBatch, TreeResult

_SUM_TOLERANCE = {torch.float64: 1e-6}  # largest |sum of a distribution - 1|; other types: 1e-3


@dataclass(frozen=True)
class TreesResult:
    """tokens long [B, D+1]: accepted path, one more token, then -1. num_accepted long [B].

    path long [B, D]: accepted nodes, then -1. A KV cache keeps the keys and values of these nodes.
    """

    tokens: Tensor
    num_accepted: Tensor
    path: Tensor

    @property
    def rows(self) -> Tensor:
        """long [B, D+1]: the target row that each token was sampled from; 0, the root's, after the last one."""
        return torch.nn.functional.pad(self.path + 1, (1, 0))


@dataclass(frozen=True)
class NodeLaw:
    """The random choice at one node of each request. The first of these that happens decides:

    1. a lead v with probability leads[v], [B, V] (only for RRSw, else None);
    2. the probe, node `probe` [B] (-1: none), with probability `accept` [B]: if u * probe_draft < probe_target;
    3. a token from `residual` [B, V].
    """

    leads: Tensor | None
    probe: Tensor
    probe_target: Tensor
    probe_draft: Tensor
    residual: Tensor

    @property
    def accept(self) -> Tensor:
        ratio = distributions.acceptance_ratio(self.probe_target, self.probe_draft)
        return torch.where(self.probe >= 0, ratio, 0.0)


def node_law(trees: TreeBatch, at: Tensor, target: Tensor) -> NodeLaw:
    """The choice at row `at` (long [B]; 0 = the root, i + 1 = node i). target: [B, V] at that row."""
    here = _children_mask(trees, at)
    is_probe = here if trees.method == "topk" else here & trees.is_probe
    has_probe, probe = is_probe.any(1), is_probe.long().argmax(1)  # the first: of topk's children only that one
    leads = None
    if trees.method == "rrsw":
        place = torch.arange(here.shape[1], device=here.device)
        is_lead = here & (place < torch.where(has_probe, probe, NO_NODE).unsqueeze(1))  # no probe: none
        leads = target * _marked(trees.tokens, is_lead, target)
        target = distributions.residual(target, leads)
    token = trees.tokens.gather(1, probe.unsqueeze(1)).clamp(min=0)
    if trees.method == "topk":
        draft = distributions.point_mass(token.squeeze(1), target)
    else:
        draft = _probe_distribution(trees, at, target)
    probe_target, probe_draft = target.gather(1, token).squeeze(1), draft.gather(1, token).squeeze(1)
    left = torch.where(has_probe.unsqueeze(1), distributions.residual(target, draft), target)
    return NodeLaw(leads, torch.where(has_probe, probe, NO_NODE), probe_target, probe_draft, left)


def child_with_token(trees: TreeBatch, at: Tensor, tokens: Tensor) -> Tensor:
    """long [B]: the kept child of row `at` whose token is `tokens` [B], or -1."""
    match = _children_mask(trees, at) & (trees.tokens == tokens.unsqueeze(1))
    return torch.where(match.any(1), match.long().argmax(1), NO_NODE)


def verify_trees(
    trees: TreeBatch,
    target: Tensor | Callable[[Tensor], Tensor],
    *,
    draws: Uniforms | None = None,
    generator: torch.Generator | None = None,
) -> TreesResult:
    """Accept a path of each tree and emit one more token.

    target [B, N+1, V]: the target at the sampling temperature, row 0 after the root, row i+1 after node i; or a
    function from rows (long [B]) to [B, V], so that only the rows on the path are computed from logits.
    draws: the requests' streams in this round, the same object that grew the trees. None: new streams from generator.

    Raises ValueError, which names the argument, for wrong shapes, rows that are not distributions, ids outside [0, V).
    """
    batch, num = trees.tokens.shape
    draws = draws or Streams.from_generator(generator, batch, trees.tokens.device)
    rows = checked_rows(trees, target)
    depth = int(trees.depths.max()) if num else 0
    at = torch.zeros(batch, dtype=torch.long, device=trees.tokens.device)
    tokens, path = at.new_full((batch, depth + 1), -1), at.new_full((batch, depth), NO_NODE)
    active = torch.ones_like(at, dtype=torch.bool)
    for level in range(depth + 1):
        p = rows(at)
        law = node_law(trees, at, p)
        y = sample(law.residual, draws, StreamId.FINAL, level)
        u = draws.uniforms(StreamId.ACCEPT, level)
        accept = (u * law.probe_draft.double() < law.probe_target.double()) & (law.probe >= 0)
        probe_token = trees.tokens.gather(1, law.probe.clamp(min=0).unsqueeze(1)).squeeze(1)
        y = torch.where(accept, probe_token, y)
        if law.leads is not None:
            lead = invert(p, draws.uniforms(StreamId.LEAD, level))
            is_lead = law.leads.gather(1, lead.unsqueeze(1)).squeeze(1) > 0
            y = torch.where(is_lead, lead, y)
        child = child_with_token(trees, at, y)
        tokens[:, level] = torch.where(active, y, -1)
        active = active & (child >= 0)
        if level == depth:
            break
        path[:, level] = torch.where(active, child, NO_NODE)
        at = torch.where(active, child + 1, at)
        if not bool(active.any()):
            break
    return TreesResult(tokens, (path >= 0).sum(1), path)


def verify_tree(tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None) -> TreeResult:
    """Accept a path of one tree and emit one more token. The emitted tokens are distributed exactly as the target.

    target_probs [n+1, V]: the target at the sampling temperature, row 0 after the root, row i+1 after node i.
    Raises ValueError as verify_trees does.
    """
    result = verify_trees(tree.batch(), target_probs.unsqueeze(0), generator=generator)
    num = int(result.num_accepted[0])
    return TreeResult(result.tokens[0, : num + 1], result.path[0, :num])


def _children_mask(trees: TreeBatch, at: Tensor) -> Tensor:
    return (trees.parents == (at - 1).unsqueeze(1)) & (trees.tokens >= 0)


def _marked(tokens: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """[B, V]: 1 at the tokens [B, N] where the mask is True. Siblings differ, so no id is counted twice."""
    return torch.zeros_like(like).scatter_add_(1, tokens.clamp(min=0), mask.to(like.dtype))


def _probe_distribution(trees: TreeBatch, at: Tensor, like: Tensor) -> Tensor:
    """qt over the vocabulary, [B, V], of the family below row `at`; 0 if that row was not expanded."""
    family = trees.family.gather(1, at.unsqueeze(1)).squeeze(1)
    row = torch.arange(len(at), device=at.device)
    probs = trees.probe_probs[row, family.clamp(min=0)] * (family >= 0).unsqueeze(1)
    return torch.zeros_like(like).scatter_(1, trees.support_ids[row, family.clamp(min=0)], probs.to(like.dtype))


def checked_rows(trees: TreeBatch, target: Tensor | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """verify_trees' `target` as a function of rows. It checks that each result is a distribution."""
    batch, num = trees.tokens.shape
    row = torch.arange(batch, device=trees.tokens.device)
    if isinstance(target, Tensor) and (target.ndim != 3 or target.shape[:2] != (batch, num + 1)):
        raise BadInput(f"target_probs: got {list(target.shape)}, expected [B, N+1, V] = [{batch}, {num + 1}, V]")
    highest = int(torch.maximum(trees.tokens.max(), trees.support_ids.max())) if num else -1

    def rows(at: Tensor) -> Tensor:
        probs = target[row, at] if isinstance(target, Tensor) else target(at)
        if probs.ndim != 2 or probs.shape[0] != batch or not probs.is_floating_point():
            got = f"{probs.dtype} {list(probs.shape)}"
            raise BadInput(f"target_probs: got {got}, expected floats [B, V] with B = {batch}")
        if highest >= probs.shape[1]:
            raise BadInput(f"trees: got token {highest}, expected ids in [0, {probs.shape[1]})")
        probs = probs if probs.dtype == torch.float64 else probs.float()
        near = (probs.sum(-1) - 1).abs() <= _SUM_TOLERANCE.get(probs.dtype, 1e-3)  # NaN compares false
        bad = ~(near & (probs >= 0).all(-1))
        if bool(bad.any()):
            b = int(bad.nonzero()[0])
            got = f"sum {float(probs[b].sum()):.6g}, smallest value {float(probs[b].min()):.3g}"
            place = f"request {b}, row {int(at[b])}"
            raise BadInput(f"target_probs: got {got} ({place}), expected a distribution: values >= 0 that sum to 1")
        return probs

    return rows
