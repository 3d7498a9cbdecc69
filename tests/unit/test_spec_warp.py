"""Logits to the sampled distribution, log-probabilities under speculation, and where a run ends."""

from __future__ import annotations

import pytest
import torch

from bebop.spec import (
    Purpose,
    Streams,
    TreeGrower,
    TreeSpec,
    keep_until_stop,
    sample,
    token_logprobs,
    verify_chain,
    verify_trees,
    warp,
)


def logits_of(*probs: float) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def test_min_p_binds_every_position_draft_and_verified_alike():
    """min_p .2 on [.6, .3, .08, .02] allows {0, 1}."""
    logits = logits_of(0.6, 0.3, 0.08, 0.02)
    expected = torch.tensor([2 / 3, 1 / 3, 0, 0], dtype=torch.float64)
    for shape in ((4,), (3, 4), (3, 5, 4)):
        found = warp(logits.expand(shape), min_p=0.2)
        torch.testing.assert_close(found, expected.expand(shape))


def test_top_p_keeps_the_fewest_ids_that_reach_it():
    """top_p .8 on [.5, .3, .15, .05]: two ids; the log-probability of the first is -.4700, unfiltered -.6931."""
    for dtype in (torch.float64, torch.float32):
        logits = logits_of(0.5, 0.3, 0.15, 0.05).to(dtype).expand(1, 1, 4)
        torch.testing.assert_close(warp(logits, top_p=0.8)[0, 0], torch.tensor([0.625, 0.375, 0, 0], dtype=dtype))
        token = torch.zeros(1, 1, dtype=torch.long)
        assert float(token_logprobs(logits, token, top_p=0.8)) == pytest.approx(-0.4700, abs=1e-4)
        assert float(token_logprobs(logits, token)) == pytest.approx(-0.6931, abs=1e-4)


def test_top_k_keeps_exactly_k_ids_and_ties_go_to_the_lowest():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert warp(logits, top_k=2)[0].tolist() == [0, 0.5, 0.5, 0, 0]
    assert warp(logits, top_k=99).count_nonzero() == 5 and warp(logits, top_k=0).count_nonzero() == 5


def test_draft_filtered_by_top_k_is_judged_by_what_it_was_sampled_from():
    """Draft logits [3, 2.6, 2.2, 1, ...], top_k 3; target [.5, .3, .2, 0...]: acceptance .9718."""
    q = warp(torch.tensor([[3, 2.6, 2.2, 1, 0.6, 0.2, 0, -0.4]], dtype=torch.float64), top_k=3)[0]
    p = torch.tensor([0.5, 0.3, 0.2, 0, 0, 0, 0, 0], dtype=torch.float64)
    assert float(torch.minimum(p, q).sum()) == pytest.approx(0.9718, abs=5e-5)


def test_settings_of_each_request_hold_in_a_mixed_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3, 20, generator=generator, dtype=torch.float64)
    settings = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 0.01], dtype=torch.float64),
        "top_k": torch.tensor([0, 3, 0, 1, 5, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.7, 0.5, 0.9, 1.0], dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.3], dtype=torch.float64),
    }
    together = warp(logits, **settings)
    torch.testing.assert_close(together.sum(-1), torch.ones(6, 3, dtype=torch.float64))
    for b in range(6):
        alone = warp(logits[b : b + 1], **{name: value[b].item() for name, value in settings.items()})
        torch.testing.assert_close(together[b], alone[0])


def test_temperature_0_is_the_argmax_and_takes_over_smoothly():
    logits = torch.tensor([[1.0, 5.0, 5.0, -torch.inf]])
    assert warp(logits, temperature=0.0).tolist() == [[0, 1, 0, 0]]
    assert warp(torch.tensor([[1.0, 5.0, 4.0, 900.0]]), temperature=1e-6).tolist() == [[0, 0, 0, 1]]


def test_temperature_0_in_a_mixed_batch_emits_the_greedy_text_by_every_rule():
    generator = torch.Generator().manual_seed(0)
    batch, depth = 400, 3
    logits = torch.randn(batch, depth + 1, 6, generator=generator, dtype=torch.float64)
    draft = logits[:, :depth] + torch.randn(batch, depth, 6, generator=generator, dtype=torch.float64)
    temperature = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(batch // 2)
    draws = Streams(torch.arange(batch), torch.zeros(batch, dtype=torch.long))
    target, q = warp(logits, temperature=temperature), warp(draft, temperature=temperature)
    greedy = logits.argmax(-1)
    sampled = sample(q, draws, Purpose.DRAFT, 0)
    for rule, drafts in (("rejection", sampled), ("block", sampled), ("target_only", draft.argmax(-1))):
        tokens = verify_chain(target, q, drafts, rule=rule, draws=draws).tokens[::2]
        assert bool(((tokens == greedy[::2]) | (tokens < 0)).all()), rule
        if rule != "target_only":
            lengths = (tokens >= 0).sum(1)
            agree = (draft[::2].argmax(-1) == greedy[::2, :depth]).long().cumprod(1).sum(1)
            assert torch.equal(lengths, agree + 1)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.4076), (0.5, -0.1429)])
def test_logprobs_are_at_the_sampling_temperature_with_and_without_speculation(temperature, expected):
    """Logits [2, 1, 0], token 0; as many as tokens, equal to plain sampling's, never 0 where none was made."""
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(1, 3, 3)
    result = verify_chain(
        warp(logits, temperature=temperature),
        warp(logits[:, :2], temperature=temperature),
        torch.zeros(1, 2, dtype=torch.long),
    )
    found = token_logprobs(logits, result.tokens, temperature=temperature)[0]
    assert found[:2].tolist() == pytest.approx([expected, expected], abs=1e-4)
    plain = (logits[0, 2] / temperature).log_softmax(-1)[result.tokens[0, 2]]
    assert float(found[2]) == pytest.approx(float(plain), abs=1e-5)
    missing = token_logprobs(logits, torch.tensor([[0, -1, -1]]), temperature=temperature)[0]
    assert bool(missing[1:].isnan().all()) and float(missing[0]) == pytest.approx(expected, abs=1e-4)


def test_logprobs_of_a_tree_come_from_the_rows_on_its_path():
    batch = 60
    generator = torch.Generator().manual_seed(0)
    draws = Streams(torch.arange(batch), torch.zeros(batch, dtype=torch.long))
    grower = TreeGrower(TreeSpec("rheo", 3, 2, 7, 1), draws, temperature=0.7)
    for width in (1, 3):
        grower.expand(torch.randn(batch, width, 5, generator=generator))
    trees = grower.finish()
    logits = torch.randn(batch, 8, 5, generator=generator)
    result = verify_trees(trees, warp(logits, temperature=0.7), draws=draws)
    found = token_logprobs(
        logits.gather(1, result.rows.unsqueeze(-1).expand(-1, -1, 5)), result.tokens, temperature=0.7
    )
    for b in range(batch):
        path = result.path[b][result.path[b] >= 0].tolist()
        for i, row in enumerate([0, *(node + 1 for node in path)]):
            expected = (logits[b, row] / 0.7).log_softmax(-1)[result.tokens[b, i]]
            assert float(found[b, i]) == pytest.approx(float(expected), abs=1e-5)
        assert bool(found[b, len(path) + 1 :].isnan().all())


def test_logprobs_at_temperature_0_are_the_models_own():
    logits = torch.tensor([[[2.0, 1.0, 0.0]], [[2.0, 1.0, 0.0]]])
    found = token_logprobs(logits, torch.zeros(2, 1, dtype=torch.long), temperature=torch.tensor([0.0, 0.5]))
    assert found.flatten().tolist() == pytest.approx([-0.4076, -0.1429], abs=1e-4)


def test_run_ends_at_a_stop_token_inside_it():
    """[10, 11, STOP, 20, 21, 22], 5 allowed: 3 tokens, reason stop; without a stop 5 tokens, reason length."""
    tokens = torch.tensor(
        [[10, 11, 2, 20, 21, 22], [10, 11, 12, 20, 21, 22], [10, 11, 12, 20, 21, 2], [2, 5, -1, -1, -1, -1]]
    )
    kept, num_kept, stopped = keep_until_stop(tokens, torch.tensor([5, 5, 5, 9]), (2, 7))
    assert kept.tolist() == [
        [10, 11, 2, -1, -1, -1],
        [10, 11, 12, 20, 21, -1],
        [10, 11, 12, 20, 21, -1],
        [2, -1, -1, -1, -1, -1],
    ]
    assert num_kept.tolist() == [3, 5, 5, 1] and stopped.tolist() == [True, False, False, True]
    assert keep_until_stop(tokens, 6)[1].tolist() == [6, 6, 6, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature: -0.1.* expected a value in \[0.0, inf\)"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0.0}, r"top_p: 0.0 came, expected a value in \(0.0, 1.0\]"),
        ({"top_p": 1.1}, "top_p: 1.1"),
        ({"min_p": -1.0}, "min_p: -1.0"),
        ({"top_k": -1}, "top_k: -1"),
        ({"top_k": 0.9}, "top_k: 0.9 came, expected whole numbers"),
        ({"temperature": torch.ones(3)}, r"temperature: shape \[3\] came, expected a number or one per request"),
    ],
)
def test_unfit_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        warp(torch.zeros(2, 4), **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_temperature_that_rounds_to_0_is_0(dtype):
    logits, token = torch.tensor([[[2.0, 1.0, 0.0]]], dtype=dtype), torch.zeros(1, 1, dtype=torch.long)
    for temperature in (1e-46, torch.tensor([1e-46], dtype=torch.float64)):
        assert warp(logits, temperature=temperature).tolist() == [[[1, 0, 0]]]
    found = token_logprobs(logits.float(), token, temperature=1e-46)
    assert float(found) == pytest.approx(-0.4076, abs=1e-4)


def test_rows_without_a_distribution_are_refused_by_place():
    logits = torch.zeros(2, 3, 4)
    logits[1, 2] = -torch.inf
    with pytest.raises(ValueError, match=r"logits: largest value -inf in row \[1, 2\]"):
        warp(logits)
    logits[0, 1, 3] = torch.nan
    with pytest.raises(ValueError, match=r"logits: largest value nan in row \[0, 1\]"):
        warp(logits)
    with pytest.raises(ValueError, match="allowed: 0 came"):
        keep_until_stop(torch.zeros(1, 2, dtype=torch.long), 0)
    with pytest.raises(ValueError, match=r"tokens: \[2, 2\] came, expected \[B, L\] = \[2, 3\]"):
        token_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 2, dtype=torch.long))
