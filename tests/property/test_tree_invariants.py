"""Whatever the drafts, filters and temperatures, float32 included: trees and what they emit are well formed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.spec import Streams, TreeGrower, TreeSpec, apply_sampling, verify_trees


@settings(max_examples=100, deadline=None)
@given(
    method=st.sampled_from(["topk", "rheo", "rrsw"]),
    batch=st.integers(1, 4),
    width=st.integers(1, 5),
    depth=st.integers(1, 4),
    budget=st.integers(1, 30),
    leads=st.one_of(st.just("auto"), st.integers(0, 4)),
    support=st.integers(1, 12),
    vocabulary=st.integers(1, 9),
    sharpness=st.sampled_from([0.0, 1.0, 30.0]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([1.0, 0.8]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_tree_is_connected_and_within_budget(
    method, batch, width, depth, budget, leads, support, vocabulary, sharpness, top_k, top_p, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    leads = leads if leads == "auto" else min(leads, width - 1)
    spec = TreeSpec(method, width, depth, budget, leads, support)
    draws = Streams(torch.randint(-(2**62), 2**62, (batch,), generator=generator), torch.arange(batch))
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0])[:batch]

    def logits(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, vocabulary, generator=generator) * sharpness
        values = values.masked_fill(torch.rand(values.shape, generator=generator) < 0.3, -torch.inf)
        values[..., 0] = values[..., 0].clamp(min=-5.0)
        return values.to(dtype)

    grower = TreeGrower(spec, draws, temperature=temperature, top_k=top_k, top_p=top_p)
    while grower.frontier is not None:
        grower.expand(logits(batch, grower.frontier.tokens.shape[1]))
    trees = grower.finish()
    num = trees.tokens.shape[1]
    assert num <= budget
    for b in range(batch):
        tree = trees.row(b)
        size = len(tree.tokens)
        assert bool((trees.tokens[b, size:] == -1).all()) and size >= 1
        seen = set()
        for node, (token, parent, level) in enumerate(
            zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True)
        ):
            assert -1 <= parent < node and 0 <= token < vocabulary and (parent, token) not in seen
            assert level == (1 if parent < 0 else int(tree.depths[parent]) + 1)
            seen.add((parent, token))
        probes = tree.parents[tree.is_probe].tolist()
        assert len(probes) == len(set(probes)) and (method != "topk" or not probes)

    target_logits = logits(batch, num + 1)
    target = apply_sampling(target_logits, temperature=temperature, top_k=top_k, top_p=top_p)
    result = verify_trees(trees, target, draws=draws)
    place = torch.arange(result.tokens.shape[1])
    assert torch.equal(result.tokens >= 0, place <= result.num_accepted.unsqueeze(1))
    for b in range(batch):
        at = -1
        for i in range(int(result.num_accepted[b]) + 1):
            assert target[b, at + 1, result.tokens[b, i]] > 0
            if i < result.num_accepted[b]:
                node = int(result.path[b, i])
                assert trees.parents[b, node] == at and trees.tokens[b, node] == result.tokens[b, i]
                at = node
