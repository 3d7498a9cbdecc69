"""The exact expected acceptance of a drafted tree: the average over the random numbers of verify_trees.

With a(c | r) the probability that the choice at row r (0 the root, i + 1 node i) is its child c,

    reach(root) = 1,  reach(c) = reach(parent) a(c | parent),  E[accepted] = sum of reach over the nodes,

where `node_law` gives a: p(v) for a lead v; for the probe, the remaining probability times its acceptance; for any
other child y, the probability that then remains times r(y). The average over drafts is the acceptance length minus 1,
with a fraction of the variance of counting.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bebop.spec.tree.spec import TreeBatch
from bebop.spec.tree.verify import checked_rows, node_law


def expected_accepted(trees: TreeBatch, target: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
    """float64 [B, D]: the expected number of accepted nodes at depth 1..D of each tree.

    target: as in verify_trees. Raises ValueError as verify_trees does.
    """
    batch, num = trees.tokens.shape
    rows = checked_rows(trees, target)
    reach = torch.zeros(batch, num + 1, dtype=torch.float64, device=trees.tokens.device)
    reach[:, 0] = 1.0
    has_children = torch.zeros(batch, num + 1, dtype=torch.bool, device=trees.tokens.device)
    has_children.scatter_(1, trees.parents + 1, trees.tokens >= 0)
    has_children[:, 0] = True
    for row in has_children.any(0).nonzero().flatten().tolist():  # parents come before children
        at = torch.full((batch,), row, device=trees.tokens.device)
        law = node_law(trees, at, rows(at).double())
        here = (trees.parents == row - 1) & (trees.tokens >= 0)
        token = trees.tokens.clamp(min=0)
        chance, left = torch.zeros_like(reach[:, 1:]), torch.ones_like(reach[:, 0])
        if law.leads is not None:
            chance = chance + law.leads.gather(1, token)
            left = left - law.leads.sum(1)
        there = left * law.accept
        chance = chance.scatter_add(1, law.probe.clamp(min=0).unsqueeze(1), there.unsqueeze(1))
        left = left - there
        chance = chance + left.clamp(min=0).unsqueeze(1) * law.residual.gather(1, token)
        reach[:, 1:] = torch.where(here, reach[:, row : row + 1] * chance, reach[:, 1:])
    depth = int(trees.depths.max()) if num else 0
    expected = torch.zeros(batch, depth + 1, dtype=torch.float64, device=reach.device)
    return expected.scatter_add(1, trees.depths, torch.where(trees.tokens >= 0, reach[:, 1:], 0.0))[:, 1:]
