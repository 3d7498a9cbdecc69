"""verify_chain at its edges: no drafts, drafts of different length, large vocabularies, and inputs that it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from bebop.spec import verify_chain

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
RULES = ("rejection", "target_only", "block")


def uniform(*shape: int) -> torch.Tensor:
    return torch.full(shape, 1 / shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_draft_without_its_distribution_is_refused(rule):
    """Without q, acceptance on P, Q would be sum PQ = .28 instead of .60."""
    with pytest.raises(ValueError, match=f"draft_probs: got None with rule={rule}"):
        verify_chain(uniform(1, 2, 3), None, torch.zeros(1, 1, dtype=torch.long), rule=rule)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_acceptance_is_the_overlap_and_1_where_draft_equals_target(rule):
    num = 100_000
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(Q.expand(num, -1), 1, generator=generator)
    result = verify_chain(P.expand(num, 2, 3), Q.expand(num, 1, 3), drafts, rule=rule, generator=generator)
    assert float(result.num_accepted.double().mean()) == pytest.approx(0.60, abs=0.006)
    without_q = verify_chain(P.expand(num, 2, 3), None, drafts, rule="target_only", generator=generator)
    assert float(without_q.num_accepted.double().mean()) == pytest.approx(0.28, abs=0.006), "what the fault would give"

    half = uniform(num, 4, 2)
    drafts = torch.randint(0, 2, (num, 3), generator=generator)
    same = verify_chain(half, half[:, :3], drafts, rule=rule, generator=generator)
    assert (same.num_accepted == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 8193, 10000, 151936])
def test_every_sampled_id_has_mass_with_a_zero_tail(vocabulary, dtype):
    generator = torch.Generator().manual_seed(1)
    probs = torch.zeros(4, 3, vocabulary, dtype=dtype)
    probs[..., :4] = torch.tensor([0.5, 0.25, 0.125, 0.125])
    drafts = torch.tensor([[0, 1], [3, -1], [-1, -1], [vocabulary - 1, 0]])
    draft_probs = uniform(4, 2, vocabulary).to(torch.float64)
    for rule in RULES:
        result = verify_chain(probs, draft_probs, drafts, rule=rule, generator=generator)
        emitted = result.tokens[result.tokens != -1]
        assert result.tokens.dtype == torch.long and ((emitted >= 0) & (emitted < 4)).all()
        assert result.num_accepted[3] == 0, "a draft without mass in the target must be rejected"


@pytest.mark.parametrize("rule", RULES)
def test_row_without_drafts_emits_one_token_of_the_target(rule):
    num = 50_000
    drafts = torch.full((num, 2), -1)
    target = torch.stack([P, uniform(3), uniform(3)]).expand(num, 3, 3)
    unread = torch.full((num, 2, 3), math.nan)
    result = verify_chain(target, unread, drafts, rule=rule, generator=torch.Generator().manual_seed(2))
    assert (result.num_accepted == 0).all() and (result.tokens[:, 1:] == -1).all()
    torch.testing.assert_close(torch.bincount(result.tokens[:, 0]) / num, P.float(), atol=0.01, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_shorter_drafts_get_their_own_bonus_token(rule):
    """Row 0 has 3 drafts, row 1 one: all accepted, and the bonus comes from position 4 and position 2."""
    target = torch.eye(5, dtype=torch.float64)[torch.tensor([[0, 1, 2, 3], [0, 4, 1, 1]])]
    drafts = torch.tensor([[0, 1, 2], [0, -1, -1]])
    result = verify_chain(target, target[:, :3], drafts, rule=rule)
    assert result.tokens.tolist() == [[0, 1, 2, 3], [0, 4, -1, -1]] and result.num_accepted.tolist() == [3, 1]


@pytest.mark.parametrize("rule", RULES)
def test_token_without_mass_is_rejected_even_for_u_0(rule):
    class Zeros:
        def uniforms(self, stream, depth, *, rows=None):
            return torch.zeros(torch.as_tensor(depth).shape, dtype=torch.float64)

    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    result = verify_chain(target, uniform(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), rule=rule, draws=Zeros())
    assert result.tokens.tolist() == [[1, -1]]


def test_same_generator_state_gives_the_same_tokens():
    drafts = torch.randint(0, 3, (64, 2), generator=torch.Generator().manual_seed(0))
    first, second = (
        verify_chain(uniform(64, 3, 3), uniform(64, 2, 3), drafts, generator=torch.Generator().manual_seed(7)).tokens
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_no_draft_positions_at_all_is_plain_sampling():
    result = verify_chain(uniform(5, 1, 3), uniform(5, 0, 3), torch.zeros(5, 0, dtype=torch.long))
    assert result.tokens.shape == (5, 1) and (result.tokens >= 0).all()


def test_not_a_number_names_row_and_position():
    target = uniform(3, 2, 4)
    target[1, 0] = math.nan
    drafts = torch.zeros(3, 1, dtype=torch.long)
    message = r"target_probs: got NaN \(row 1, position 0\), expected a distribution"
    with pytest.raises(ValueError, match=message):
        verify_chain(target, uniform(3, 1, 4), drafts)
    with pytest.raises(ValueError, match=r"draft_probs: got NaN \(row 1, position 0\)"):
        verify_chain(uniform(3, 2, 4), target[:, :1], drafts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "greedy"}, "rule: got 'greedy', expected one of rejection, target_only, block"),
        ({"draft_tokens": torch.tensor([[4, 0], [0, 0]])}, r"draft_tokens: got 4 \(row 0, position 0\)"),
        ({"draft_tokens": torch.tensor([[0, 0], [0, -2]])}, r"draft_tokens: got -2 \(row 1, position 1\)"),
        ({"draft_tokens": torch.tensor([[0, 0], [-1, 2]])}, r"got a draft after a -1 \(row 1, position 1\)"),
        ({"draft_tokens": torch.zeros(2, 2)}, "draft_tokens: got torch.float32"),
        ({"draft_tokens": torch.zeros(2, dtype=torch.long)}, r"expected integers \[B, K\]"),
        ({"target_probs": uniform(2, 2, 4)}, r"target_probs: .* expected floats \[B, K\+1, V\] = \[2, 3, V\]"),
        ({"target_probs": torch.zeros(2, 3, 4, dtype=torch.long)}, "target_probs: got torch.int64"),
        ({"target_probs": uniform(2, 3, 4) * 2}, r"target_probs: got sum 2 \(row 0, position 0\)"),
        ({"target_probs": torch.tensor([1.5, -0.5, 0, 0]).expand(2, 3, 4)}, "target_probs: got smallest value -0.5"),
        ({"draft_probs": uniform(2, 2, 5)}, r"draft_probs: .* expected floats \[B, K, V\] = \[2, 2, 4\]"),
    ],
)
def test_bad_input_is_an_error_that_names_the_argument(change, message):
    arguments = {
        "target_probs": uniform(2, 3, 4),
        "draft_probs": uniform(2, 2, 4),
        "draft_tokens": torch.zeros(2, 2, dtype=torch.long),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        verify_chain(**arguments)
