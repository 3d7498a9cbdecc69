"""Random numbers addressed by request, round and stream, and the draws made from them."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare, kstest

from bebop.spec import StreamId, Streams, invert, sample, verify_chain
from bebop.spec.random import philox

P = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4, 0.0], dtype=torch.float64)


def requests(num: int, position: int = 0) -> Streams:
    return Streams(torch.arange(num), torch.full((num,), position))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_vectors(counter, key, expected):
    words = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("along", ["seed", "position", "depth", "rows"])
def test_numbers_are_uniform_along_every_part_of_the_address(along):
    num = 100_000
    one = torch.zeros(1, dtype=torch.long)
    numbers = {
        "seed": lambda: requests(num).uniforms(StreamId.ACCEPT, 0),
        "position": lambda: Streams(torch.full((num,), 3), torch.arange(num)).uniforms(StreamId.ACCEPT, 0),
        "depth": lambda: Streams(one, one).uniforms(StreamId.ACCEPT, torch.arange(num).unsqueeze(0)),
        "rows": lambda: Streams(one, one).uniforms(StreamId.DRAFT, 2, rows=num),
    }[along]().flatten()
    assert numbers.shape == (num,) and float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert kstest(numbers.numpy(), "uniform").pvalue > 1e-3
    neighbours = torch.stack([numbers[:-1], numbers[1:]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 4 / num**0.5
    cells = (neighbours * 8).long()
    counts = torch.bincount(cells[0, ::2] * 8 + cells[1, ::2], minlength=64)
    assert chisquare(counts.numpy()).pvalue > 1e-3


def test_streams_and_depths_share_no_numbers():
    streams = requests(20_000, position=5)
    numbers = torch.stack([streams.uniforms(stream, depth) for stream in StreamId for depth in (0, 1)])
    numbers = torch.cat([numbers, streams.uniforms(StreamId.DRAFT, 0, rows=3).T[1:]])
    correlation = torch.corrcoef(numbers) - torch.eye(len(numbers), dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / 20_000**0.5
    assert len(numbers.flatten().unique()) == numbers.numel()


def test_seeds_of_any_sign_and_size_are_different_streams():
    seeds = torch.tensor([0, 1, -1, 2**32, 2**32 + 1, -(2**63), 2**63 - 1])
    assert len(Streams(seeds, torch.zeros_like(seeds)).uniforms(StreamId.FINAL, 0).unique()) == len(seeds)


def test_shapes_of_addresses():
    streams = requests(4)
    assert streams.uniforms(StreamId.FINAL, 0).shape == (4,)
    assert streams.uniforms(StreamId.FINAL, torch.arange(4)).shape == (4,)
    assert streams.uniforms(StreamId.FINAL, torch.arange(3).unsqueeze(0)).shape == (4, 3)
    assert streams.uniforms(StreamId.DRAFT, 1, rows=3).shape == (4, 3)


def test_unfit_streams_are_refused_by_name():
    with pytest.raises(ValueError, match="seeds: "):
        Streams(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"positions: got torch.int64 \[3\], expected int64 \[B\], B = 2"):
        Streams(torch.arange(2), torch.arange(3))


@pytest.mark.parametrize("rule", ["rejection", "target_only", "block"])
def test_request_gets_the_same_tokens_in_any_batch(rule):
    """Three requests and more with distinct q, the batch reversed and cut between draft and verify."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(8, 4, 5, generator=generator, dtype=torch.float64).softmax(-1)
    q = torch.randn(8, 3, 5, generator=generator, dtype=torch.float64).softmax(-1)
    draws = Streams(torch.arange(8) * 1_000_003, torch.arange(8))
    drafts = q.argmax(-1) if rule == "target_only" else sample(q, draws, StreamId.DRAFT, 0)
    together = verify_chain(target, q, drafts, rule=rule, draws=draws).tokens
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3], [2, 0, 6]):
        some = Streams(draws.seeds[order], draws.positions[order])
        assert rule == "target_only" or torch.equal(sample(q[order], some, StreamId.DRAFT, 0), drafts[order])
        tokens = verify_chain(target[order], q[order], drafts[order], rule=rule, draws=some).tokens
        assert torch.equal(tokens, together[order])


def test_inversion_gives_each_id_exactly_its_interval():
    """Of 1000 points, evenly spaced, an interval of length w holds 1000 w."""
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(invert(P.expand(1000, -1), grid), minlength=6)
    assert counts.tolist() == [100, 200, 0, 300, 400, 0]


@pytest.mark.parametrize("scale", [1.0, 1e-300, 7.3, 1e300])
def test_no_draw_returns_an_id_without_weight(scale):
    edges = torch.tensor([0.0, 0.1, 0.3, 0.6, 1 - 2**-53], dtype=torch.float64)
    weights = torch.cat([torch.zeros(1, dtype=torch.float64), P * scale]).expand(5, -1)
    assert bool((weights.gather(1, invert(weights, edges).unsqueeze(1)) > 0).all())


def test_draws_have_the_weights_law():
    drawn = sample(P.expand(100_000, -1), requests(100_000), StreamId.FINAL, 0)
    counts = torch.bincount(drawn, minlength=6)
    assert counts[2] == counts[5] == 0
    assert chisquare(counts[P > 0].numpy(), (P[P > 0] * 100_000).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("address", ["round", "token"])
def test_numbers_addressed_by_round_keep_block_verification_exact_over_rounds(address):
    """Drafts addressed by their own token position reuse a rejected draft's number, which what was accepted depends
    on: the fault must show, and addressing by round must not."""
    num, gamma, length = 200_000, 3, 4
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.3, 0.5, 0.2]], dtype=torch.float64)  # by the last token
    q = torch.tensor([[0.3, 0.4, 0.3], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]], dtype=torch.float64)
    seeds = torch.arange(num)
    text = torch.zeros(num, length + gamma + 2, dtype=torch.long)  # text[0] is the prompt
    done = torch.ones(num, dtype=torch.long)
    rows = torch.arange(num)
    for _ in range(length):
        draws = Streams(seeds, done)
        last, drafts = text[rows, done - 1], []
        for depth in range(gamma):
            number = draws.uniforms(StreamId.DRAFT, depth)
            if address == "token":
                number = Streams(seeds, done + depth).uniforms(StreamId.DRAFT, 0)
            last = invert(q[last], number)
            drafts.append(last)
        drafts = torch.stack(drafts, 1)
        before = torch.cat([text[rows, done - 1].unsqueeze(1), drafts], 1)
        result = verify_chain(p[before], q[before[:, :-1]], drafts, rule="block", draws=draws)
        for i in range(gamma + 1):
            place = (done + i).clamp(max=text.shape[1] - 1)
            keep = (result.tokens[:, i] >= 0) & (done + i < text.shape[1])
            text[rows, place] = torch.where(keep, result.tokens[:, i], text[rows, place])
        done = (done + result.num_accepted + 1).clamp(max=text.shape[1] - gamma - 1)
    emitted = text[:, 1 : length + 1]
    code = (emitted * 3 ** torch.arange(length)).sum(1)
    cells = torch.cartesian_prod(*[torch.arange(3)] * length).flip(1)
    chance, last = torch.ones(len(cells), dtype=torch.float64), torch.zeros(len(cells), dtype=torch.long)
    for i in range(length):
        chance, last = chance * p[last, cells[:, i]], cells[:, i]
    expected = torch.zeros(3**length, dtype=torch.float64)
    expected[(cells * 3 ** torch.arange(length)).sum(1)] = chance
    pvalue = chisquare(torch.bincount(code, minlength=3**length).numpy(), (expected * num).numpy()).pvalue
    assert pvalue > 1e-3 if address == "round" else pvalue < 1e-6
