"""Draws by inverse CDF in place of vLLM's: the same distributions, each request its own stream."""

from types import SimpleNamespace

import pytest
import torch

from bebop.engines.vllm_engine.sampling import ROWS, draft_tokens, draw, recovered_tokens

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.2, 0.6])
NUM = 40_000


def metadata(num, temperature=1.0, generators=None):
    heat = torch.full((num,), temperature) if isinstance(temperature, float) else temperature
    return SimpleNamespace(
        all_greedy=False, all_random=bool((heat > 0).all()), temperature=heat, generators=generators or {}
    )


def share(tokens, size=3):
    return torch.bincount(tokens.long(), minlength=size) / len(tokens)


def test_draws_follow_the_weights_and_leave_out_what_has_none():
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]).expand(NUM, 5)
    assert (share(draw(weights, {}), 5) - torch.tensor([0, 0.25, 0, 0.75, 0])).abs().max() < 0.01
    assert set(draw(torch.eye(5)[[4, 0, 2]], {}).tolist()) == {4, 0, 2}


def test_largest_uniform_number_draws_a_token_with_weight(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **kwargs: torch.ones(*shape, dtype=torch.float64))
    assert draw(torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0]]), {}).tolist() == [1, 0]


def test_a_row_with_a_generator_draws_from_it_alone():
    def drawn(seed, rows=ROWS + 3):
        return draw(P.expand(rows, 3), {rows - 1: torch.Generator().manual_seed(seed)})[-1].item()

    assert [drawn(seed) for seed in range(12)] == [drawn(seed, 2) for seed in range(12)]
    assert len({drawn(seed) for seed in range(12)}) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drafts_are_drawn_from_the_distribution_that_is_returned(temperature):
    torch.manual_seed(1)
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(NUM, 3).clone()
    tokens, probs = draft_tokens(logits, metadata(NUM, temperature))
    assert torch.allclose(probs[0], torch.softmax(torch.tensor([2.0, 1.0, 0.0]) / temperature, -1))
    assert (share(tokens) - probs[0]).abs().max() < 0.01


def test_greedy_requests_draft_their_mode_and_leave_their_generator_alone():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    tokens, _ = draft_tokens(torch.randn(2, 9), metadata(2, torch.tensor([0.0, 1.0]), {0: generator}))
    logits = torch.randn(1, 9)
    assert draft_tokens(logits, metadata(1, torch.tensor([0.0])))[0].item() == logits.argmax()
    assert torch.equal(before, generator.get_state()) and tokens.shape == (2,)


def test_recovered_tokens_follow_the_residual():
    torch.manual_seed(2)
    ids = torch.full((NUM,), 2, dtype=torch.int32)
    args = (3, [3] * (NUM // 3) + [NUM % 3], None, ids)
    tokens = recovered_tokens(*args, Q.expand(NUM, 3), P.expand(NUM, 3), metadata(1), torch.device("cpu"))
    assert tokens.dtype == ids.dtype
    assert (share(tokens) - torch.tensor([0.75, 0.25, 0.0])).abs().max() < 0.01
    certain = recovered_tokens(*args, None, P.expand(NUM, 3), metadata(1), torch.device("cpu"))
    assert (share(certain) - torch.tensor([0.625, 0.375, 0.0])).abs().max() < 0.01


def test_recovered_tokens_come_from_the_requests_generator():
    def tokens(seed, *, before):
        ids = torch.zeros(before + 3, dtype=torch.int32)
        generators = {1: torch.Generator().manual_seed(seed)}
        uniform = torch.full((before + 3, 50), 1 / 50)
        draft = torch.eye(50)[[0]].expand(before + 3, 50)
        got = recovered_tokens(3, [before, 3], None, ids, draft, uniform, metadata(2, 1.0, generators), None)
        return got[before:].tolist()

    assert tokens(5, before=2) == tokens(5, before=0) != tokens(6, before=2)


def test_padding_is_recovered_from_the_target_itself():
    torch.manual_seed(4)
    ids = torch.full((NUM,), -1)
    for draft in (None, torch.zeros(NUM, 3)):
        tokens = recovered_tokens(
            3, [3] * (NUM // 3) + [NUM % 3], None, ids, draft, Q.expand(NUM, 3), metadata(1), None
        )
        assert (share(tokens) - Q).abs().max() < 0.01
