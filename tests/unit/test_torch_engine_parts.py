"""Parts of the torch engine against their formulas: attention over the cache, masks, moves, random numbers, slots."""

import math

import pytest
import torch

from bebop.config import RolloutSection
from bebop.engines import make_engine
from bebop.engines.torch_engine.kv_cache import Cache, Window, fold
from bebop.engines.torch_engine.model import Policy
from bebop.engines.torch_engine.random import RoundDraws
from bebop.errors import EngineRefused
from bebop.policies import random_checkpoint
from bebop.spec import StreamId, Streams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("policy"), vocab=20, seed=5)


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_over_the_cache_is_the_formula(groups):
    generator = torch.Generator().manual_seed(2)
    batch, tokens, key_heads, width, start = 2, 3, 2, 8, 4
    cache = Cache(
        num_layers=1,
        num_slots=4,
        num_kv_heads=key_heads,
        num_columns=9,
        head_dim=width,
        dtype=torch.float32,
        device=CPU,
    )
    cache.entries.normal_(generator=generator)
    q = torch.randn(batch, tokens, key_heads * groups, width, generator=generator)
    k, v = (torch.randn(batch, tokens, key_heads, width, generator=generator) for _ in range(2))
    committed = torch.tensor([[True, True, False, False], [True, True, True, True]])
    own = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(batch, -1, -1)
    out = Window(cache, 1, start, fold(committed, own, start, groups, torch.float32)).attend(0, q, k, v)
    for b in range(batch):
        for t in range(tokens):
            seen = torch.cat([committed[b], own[b, t]]).nonzero().squeeze(1)
            for h in range(key_heads * groups):
                keys, values = (cache.entries[i, 0, 1 + b, h // groups][seen] for i in (0, 1))
                weights = (keys @ q[b, t, h] / math.sqrt(width)).softmax(0)
                assert torch.allclose(out[b, t].view(-1, width)[h], weights @ values, atol=1e-5)
    assert torch.equal(cache.entries[0, 0, 1:3, :, 4:7], k.transpose(1, 2))


def test_accepted_columns_move_behind_each_text_and_nothing_else_does():
    cache = Cache(
        num_layers=1, num_slots=3, num_kv_heads=1, num_columns=10, head_dim=1, dtype=torch.float32, device=CPU
    )
    cache.entries[:] = torch.arange(10.0).view(-1, 1)
    cache.keep(torch.tensor([2, 5]), torch.tensor([[5, 7, 9], [5, 8, -1]]))
    rows = cache.entries[1, 0, :, 0, :, 0].tolist()
    assert rows[0] == [0, 1, 5, 7, 9, 5, 6, 7, 8, 9]
    assert rows[1] == [0, 1, 2, 3, 4, 5, 8, 7, 8, 9]
    assert rows[2] == list(range(10))


def test_numbers_made_in_one_go_are_the_streams_own():
    streams = Streams(torch.tensor([3, -9, 2**62]), torch.tensor([0, 5, 70000]))
    sizes = {StreamId.ACCEPT: (4, 1), StreamId.FINAL: (4, 1), StreamId.LEAD: (4, 1), StreamId.DRAFT: (3, 5)}
    draws = RoundDraws(streams, sizes)
    asked = [(stream, depth, {}) for stream in sizes for depth in range(3)]
    asked += [(StreamId.DRAFT, depth, {"rows": rows}) for depth in range(3) for rows in (1, 5)]
    asked += [(StreamId.ACCEPT, torch.arange(4).unsqueeze(0), {})]
    asked += [(StreamId.FINAL, torch.tensor([0, 3, 2]), {})]
    # and what was not made in advance
    asked += [(StreamId.DRAFT, 7, {}), (StreamId.DRAFT, 1, {"rows": 9})]
    for stream, depth, axes in asked:
        assert torch.equal(draws.uniforms(stream, depth, **axes), streams.uniforms(stream, depth, **axes)), (
            stream,
            depth,
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_follow_an_update_of_the_weights(directory, dtype):
    policy = Policy(directory, heads=True, num_positions=8, dtype=getattr(torch, dtype), device=CPU)
    x = torch.randn(1, 1, policy.config.hidden_size, dtype=policy.dtype)
    before = policy.draft_logits(x)
    policy.views["lm_head.weight"].mul_(2)
    policy.refresh()
    assert torch.allclose(policy.draft_logits(x), 2 * before, rtol=1e-2, atol=1e-2)


def test_cache_too_small_for_one_request_is_refused(directory):
    with pytest.raises(EngineRefused, match=r"rollout\.kv_cache_gib=0\.0001 .*rollout\.max_model_len=512"):
        make_engine(RolloutSection(engine="torch", kv_cache_gib=0.0001), directory)


def test_slots_are_as_many_as_the_memory_holds(directory):
    with make_engine(RolloutSection(engine="torch", kv_cache_gib=0.002, max_model_len=64), directory) as engine:
        held = engine._rounds.cache.bytes + engine._rounds.head_cache.bytes
        assert engine._rounds.num_slots < 64
        assert 0.9 * 0.002 * 2**30 < held <= 0.002 * 2**30
