"""Inputs that chains are tested with elsewhere, given to trees: padded vocabularies, filters, reordered batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bebop.spec import Streams, TreeBatch, TreeGrower, TreeSpec, apply_sampling, verify_trees

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def requests(num: int, first: int = 0) -> Streams:
    return Streams(torch.arange(first, first + num) * 7919, torch.arange(num) % 5)


def grown(spec: TreeSpec, draws: Streams, logits: Tensor, **settings: object) -> TreeBatch:
    """Trees whose every node of request b drafts from logits[b]; logits [B, V]."""
    grower = TreeGrower(spec, draws, **settings)
    while grower.frontier is not None:
        width = grower.frontier.tokens.shape[1]
        grower.expand(logits.unsqueeze(1).expand(-1, width, -1))
    return grower.finish()


@pytest.mark.parametrize("method", ["topk", "rheo", "rrsw"])
@pytest.mark.parametrize("vocabulary", [5, 8193, 10000, 151936])
def test_every_tree_id_has_mass_with_a_zero_tail(vocabulary, method):
    """Draft and target end in ids that can't be: a padded vocabulary, or a filter's -inf."""
    logits = torch.full((6, vocabulary), -torch.inf)
    logits[:, :4] = torch.tensor([1.0, 0.5, 0.0, -0.5])
    draws = requests(6)
    trees = grown(TreeSpec(method, 5, 3, 12, 1), draws, logits, temperature=1.0)
    assert bool(((trees.tokens >= -1) & (trees.tokens < vocabulary)).all())
    target = logits.softmax(-1)
    result = verify_trees(trees, lambda at: target, draws=draws)
    emitted = result.tokens[result.tokens != -1]
    assert bool(((emitted >= 0) & (emitted < 4)).all())


@pytest.mark.parametrize("method", ["topk", "rheo", "rrsw"])
def test_min_p_binds_every_token_that_a_tree_emits(method):
    """min_p .2 on [.6, .3, .08, .02] allows {0, 1}; some of the drafted nodes are others, none of them is emitted."""
    num = 500
    logits = torch.tensor([0.6, 0.3, 0.08, 0.02], dtype=torch.float64).log().expand(num, -1)
    draws = requests(num)
    trees = grown(TreeSpec(method, 4, 3, 40, 1), draws, logits, temperature=1.0, min_p=0.2)
    assert bool((trees.tokens > 1).any()), "fills are chosen by q without filters"
    target = apply_sampling(logits, min_p=0.2)
    result = verify_trees(trees, lambda at: target, draws=draws)
    assert {0, 1} <= set(result.tokens.unique().tolist()) <= {-1, 0, 1}


@pytest.mark.parametrize("method", ["topk", "rheo", "rrsw"])
def test_reordered_trees_give_each_request_its_own_tokens(method):
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(8, 9, generator=generator, dtype=torch.float64)
    target = torch.randn(8, 9, generator=generator, dtype=torch.float64).softmax(-1)
    draws, spec = requests(8), TreeSpec(method, 3, 3, 8, 1)
    trees = grown(spec, draws, draft, temperature=0.8)
    together = verify_trees(trees, lambda at: target, draws=draws).tokens
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3], [2, 0, 6]):
        some = Streams(draws.seeds[order], draws.positions[order])
        fields = {name: value[order] for name, value in vars(trees).items() if isinstance(value, Tensor)}
        there = target[order]
        tokens = verify_trees(replace(trees, **fields), lambda at, there=there: there, draws=some).tokens
        assert torch.equal(tokens, together[order][:, : tokens.shape[1]])
