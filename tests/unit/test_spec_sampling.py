"""From logits to the sampled distribution, for draft and target alike."""

from __future__ import annotations

import pytest
import torch

from bebop.spec import StreamId, Streams, apply_sampling, sample, verify_chain


def logits_of(*probs: float) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def test_min_p_binds_every_position_draft_and_verified_alike():
    """min_p .2 on [.6, .3, .08, .02] allows {0, 1}."""
    logits = logits_of(0.6, 0.3, 0.08, 0.02)
    expected = torch.tensor([2 / 3, 1 / 3, 0, 0], dtype=torch.float64)
    for shape in ((4,), (3, 4), (3, 5, 4)):
        found = apply_sampling(logits.expand(shape), min_p=0.2)
        torch.testing.assert_close(found, expected.expand(shape))


def test_top_p_keeps_the_fewest_ids_that_reach_it():
    """top_p .8 on [.5, .3, .15, .05]: two ids; the log-probability of the first is -.4700, unfiltered -.6931."""
    for dtype in (torch.float64, torch.float32):
        logits = logits_of(0.5, 0.3, 0.15, 0.05).to(dtype).expand(1, 1, 4)
        torch.testing.assert_close(
            apply_sampling(logits, top_p=0.8)[0, 0], torch.tensor([0.625, 0.375, 0, 0], dtype=dtype)
        )
        assert float(apply_sampling(logits, top_p=0.8)[0, 0, 0].log()) == pytest.approx(-0.4700, abs=1e-4)
        assert float(apply_sampling(logits)[0, 0, 0].log()) == pytest.approx(-0.6931, abs=1e-4)


def test_top_k_keeps_exactly_k_ids_with_stable_ties():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert apply_sampling(logits, top_k=2)[0].tolist() == [0, 0.5, 0.5, 0, 0]
    assert (
        apply_sampling(logits, top_k=99).count_nonzero() == 5 and apply_sampling(logits, top_k=0).count_nonzero() == 5
    )


def test_settings_of_each_request_hold_in_a_mixed_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3, 20, generator=generator, dtype=torch.float64)
    settings = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 0.01], dtype=torch.float64),
        "top_k": torch.tensor([0, 3, 0, 1, 5, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.7, 0.5, 0.9, 1.0], dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.3], dtype=torch.float64),
    }
    together = apply_sampling(logits, **settings)
    torch.testing.assert_close(together.sum(-1), torch.ones(6, 3, dtype=torch.float64))
    for b in range(6):
        alone = apply_sampling(logits[b : b + 1], **{name: value[b].item() for name, value in settings.items()})
        torch.testing.assert_close(together[b], alone[0])


def test_temperature_0_is_the_argmax_and_takes_over_smoothly():
    logits = torch.tensor([[1.0, 5.0, 5.0, -torch.inf]])
    assert apply_sampling(logits, temperature=0.0).tolist() == [[0, 1, 0, 0]]
    assert apply_sampling(torch.tensor([[1.0, 5.0, 4.0, 900.0]]), temperature=1e-6).tolist() == [[0, 0, 0, 1]]


def test_temperature_0_in_a_mixed_batch_is_greedy():
    generator = torch.Generator().manual_seed(0)
    batch, depth = 400, 3
    logits = torch.randn(batch, depth + 1, 6, generator=generator, dtype=torch.float64)
    draft = logits[:, :depth] + torch.randn(batch, depth, 6, generator=generator, dtype=torch.float64)
    temperature = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(batch // 2)
    draws = Streams(torch.arange(batch), torch.zeros(batch, dtype=torch.long))
    target, q = apply_sampling(logits, temperature=temperature), apply_sampling(draft, temperature=temperature)
    greedy = logits.argmax(-1)
    sampled = sample(q, draws, StreamId.DRAFT, 0)
    for rule, drafts in (("rejection", sampled), ("block", sampled), ("target_only", draft.argmax(-1))):
        tokens = verify_chain(target, q, drafts, rule=rule, draws=draws).tokens[::2]
        assert bool(((tokens == greedy[::2]) | (tokens < 0)).all()), rule
        if rule != "target_only":
            lengths = (tokens >= 0).sum(1)
            agree = (draft[::2].argmax(-1) == greedy[::2, :depth]).long().cumprod(1).sum(1)
            assert torch.equal(lengths, agree + 1)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.4076), (0.5, -0.1429)])
def test_probabilities_are_at_the_sampling_temperature(temperature, expected):
    """Logits [2, 1, 0], token 0."""
    probs = apply_sampling(torch.tensor([[2.0, 1.0, 0.0]]), temperature=temperature)
    assert float(probs[0, 0].log()) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature: got -0.1, expected a value in \[0.0, inf\)"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"top_p": 0.0}, r"top_p: got 0.0, expected a value in \(0.0, 1.0\]"),
        ({"top_p": 1.1}, "top_p: got 1.1"),
        ({"min_p": -1.0}, "min_p: got -1.0"),
        ({"top_k": -1}, "top_k: got -1"),
        ({"top_k": 0.9}, "top_k: got 0.9, expected whole numbers"),
        ({"temperature": torch.ones(3)}, r"temperature: got shape \[3\], expected a number or one per request"),
    ],
)
def test_unfit_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        apply_sampling(torch.zeros(2, 4), **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_temperature_that_rounds_to_0_is_0(dtype):
    logits = torch.tensor([[[2.0, 1.0, 0.0]]], dtype=dtype)
    for temperature in (1e-46, torch.tensor([1e-46], dtype=torch.float64)):
        assert apply_sampling(logits, temperature=temperature).tolist() == [[[1, 0, 0]]]


def test_rows_without_a_distribution_are_refused_by_place():
    logits = torch.zeros(2, 3, 4)
    logits[1, 2] = -torch.inf
    with pytest.raises(ValueError, match=r"logits: largest value in row \[1, 2\]: got -inf"):
        apply_sampling(logits)
    logits[0, 1, 3] = torch.nan
    with pytest.raises(ValueError, match=r"logits: largest value in row \[0, 1\]: got nan"):
        apply_sampling(logits)
