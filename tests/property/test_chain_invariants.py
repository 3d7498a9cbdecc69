"""Whatever the drafts and distributions, float32 included: verify_chain's output is well formed and has target mass."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.spec import verify_chain


@settings(max_examples=100, deadline=None)
@given(
    rule=st.sampled_from(["rejection", "target_only", "block"]),
    batch=st.integers(1, 5),
    depth=st.integers(0, 4),
    vocabulary=st.integers(1, 6),
    sparsity=st.floats(0, 0.9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**32),
)
def test_accepted_prefix_then_one_token_then_padding(rule, batch, depth, vocabulary, sparsity, dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def probs(*shape: int) -> torch.Tensor:
        weight = torch.rand(*shape, vocabulary, generator=generator, dtype=dtype)
        weight = weight * (torch.rand(weight.shape, generator=generator) >= sparsity)
        weight[..., 0] += weight.sum(-1) == 0
        return weight / weight.sum(-1, keepdim=True)

    target, draft_probs = probs(batch, depth + 1), probs(batch, depth)
    drafts = torch.randint(0, vocabulary, (batch, depth), generator=generator)
    num_drafts = torch.randint(0, depth + 1, (batch,), generator=generator)
    drafts[torch.arange(depth) >= num_drafts.unsqueeze(1)] = -1

    result = verify_chain(target, draft_probs, drafts, rule=rule, generator=generator)

    assert result.tokens.shape == (batch, depth + 1) and (result.num_accepted <= num_drafts).all()
    for row, accepted in enumerate(result.num_accepted.tolist()):
        tokens = result.tokens[row].tolist()
        assert tokens[:accepted] == drafts[row, :accepted].tolist()
        assert tokens[accepted + 1 :] == [-1] * (depth - accepted)
        for position, token in enumerate(tokens[: accepted + 1]):
            assert target[row, position, token] > 0
