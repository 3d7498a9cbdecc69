"""Expected acceptance by every rule from scores of a text, against enumeration and the rules that engines run."""

import itertools

import numpy as np
import pytest
import torch

from bebop.evaluate.agreement import by_response, expected_counts
from bebop.spec import RULES, DraftScores, verify_chain

V, K = 3, 3


def _model(seed):
    """p, q: dicts from a prefix to its float64 distribution, for all prefixes shorter than K."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for n in range(K) for prefix in itertools.product(range(V), repeat=n)]

    def draw():
        return {x: torch.softmax(2 * torch.randn(V, generator=generator, dtype=torch.float64), 0) for x in prefixes}

    return draw(), draw()


TEXTS = list(itertools.product(range(V), repeat=K))


def _along(tables, text):
    """[K] rows of a model along a text."""
    return torch.stack([tables[text[:i]] for i in range(K)])


def _scores(p, q, sampler=None):
    """Every text of K tokens as an anchor: its probability under the sampler (the target p if None), and its scores."""
    target, draft = (torch.stack([_along(tables, t) for t in TEXTS], 1) for tables in (p, q))  # [K, N, V]
    token = torch.tensor(TEXTS).T

    def of_token(probs):
        return probs.gather(-1, token[..., None]).squeeze(-1)

    sampled = of_token(torch.stack([_along(sampler or p, t) for t in TEXTS], 1))
    top = draft.argmax(-1)
    scores = DraftScores(
        alpha=torch.minimum(target, draft).sum(-1),
        target_logprob=of_token(target).log(),
        draft_logprob=of_token(draft).log(),
        target_prob_of_draft_argmax=target.gather(-1, top[..., None]).squeeze(-1),
        is_draft_argmax=top == token,
        sampled_logprob=sampled.log() if sampler else None,
    )
    return sampled.prod(0), scores


def _block_by_enumeration(p, q):
    """P(first j accepted) over all drafts by the tests h_i of block verification, written out."""
    accepted = np.zeros(K)
    for draft in itertools.product(range(V), repeat=K):
        weight, tests = 1.0, []
        drawn = np.prod([q[draft[:i]][draft[i]].item() for i in range(K)])
        for i in range(1, K + 1):
            before, token = draft[: i - 1], draft[i - 1]
            weight = min(1.0, weight * (p[before][token] / q[before][token]).item())
            if i < K:
                left = (weight * p[draft[:i]] - q[draft[:i]]).clamp(min=0).sum().item()
                tests.append(left / (left + 1 - weight) if left + 1 - weight > 0 else 1.0)
            else:
                tests.append(weight)
        for j in range(1, K + 1):  # the last test that passes is at j or later
            accepted[j - 1] += drawn * (1 - np.prod([1 - h for h in tests[j - 1 :]]))
    return accepted


@pytest.mark.parametrize("seed", range(5))
def test_block_estimate_equals_enumeration_of_its_tests(seed):
    p, q = _model(seed)
    prob, scores = _scores(p, q)
    assert prob.sum().item() == pytest.approx(1)
    exact = _block_by_enumeration(p, q)
    block = RULES["block"].expected(scores) @ prob
    assert block.tolist() == pytest.approx(exact, abs=1e-12)
    without_control = RULES["block"].given_text(scores) @ prob
    assert without_control.tolist() == pytest.approx(exact, abs=1e-12)
    rejection = RULES["rejection"].expected(scores) @ prob
    assert (block >= rejection - 1e-12).all() and block[0].item() == pytest.approx(rejection[0].item())
    assert block.sum() > rejection.sum() + 1e-3, "block verification accepts more"


@pytest.mark.parametrize("rule", list(RULES))
def test_both_estimates_of_a_rule_agree_for_any_sampler(rule):
    """By enumeration: from the policy's own text, given the text, and from another policy's text with its weights."""
    p, q = _model(3)
    other, _ = _model(4)
    prob, scores = _scores(p, q)
    expected = RULES[rule].expected(scores) @ prob
    assert (RULES[rule].given_text(scores) @ prob).tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    prob, scores = _scores(p, q, other)
    assert (RULES[rule].expected(scores) @ prob).tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("rule", list(RULES))
def test_estimates_agree_with_the_rules_that_the_engines_run(rule):
    """200,000 drafts through verify_chain."""
    p, q = _model(7)
    prob, scores = _scores(p, q)
    expected = RULES[rule].expected(scores) @ prob
    generator = torch.Generator().manual_seed(0)
    if RULES[rule].draft == "argmax":
        draft = ()
        for _ in range(K):
            draft += (int(q[draft].argmax()),)
        number = torch.full((200_000,), TEXTS.index(draft))
    else:
        drawn = torch.tensor([np.prod([q[t[:i]][t[i]].item() for i in range(K)]) for t in TEXTS])
        number = torch.multinomial(drawn, 200_000, replacement=True, generator=generator)
    end = torch.full((1, V), 1 / V, dtype=torch.float64)
    targets = torch.stack([torch.cat([_along(p, t), end]) for t in TEXTS])
    drafts = torch.stack([_along(q, t) for t in TEXTS])
    result = verify_chain(targets[number], drafts[number], torch.tensor(TEXTS)[number], rule=rule, generator=generator)
    for j in range(K):
        share = (result.num_accepted > j).double().mean().item()
        assert share == pytest.approx(expected[j].item(), abs=4 * (0.25 / 200_000) ** 0.5)


def test_the_known_bias_of_the_product_form():
    """Accepted tokens follow min(p, q): the weighted form accounts for it, the plain product of alphas does not."""
    p, q = _model(1)
    prob, scores = _scores(p, q)
    exact = np.zeros(K)
    for j in range(1, K + 1):
        for prefix in itertools.product(range(V), repeat=j):
            exact[j - 1] += np.prod([min(p[prefix[:i]][prefix[i]], q[prefix[:i]][prefix[i]]).item() for i in range(j)])
    assert (RULES["rejection"].expected(scores) @ prob).tolist() == pytest.approx(exact, abs=1e-12)
    assert abs((scores.alpha.cumprod(0) @ prob)[2].item() - exact[2]) > 1e-3


def test_impossible_tokens_carry_no_weight():
    scores = DraftScores(
        alpha=torch.tensor([[0.5], [0.5]]),
        target_logprob=torch.tensor([[-torch.inf], [-1.0]]),
        draft_logprob=torch.tensor([[-torch.inf], [-2.0]]),
        target_prob_of_draft_argmax=torch.tensor([[0.5], [0.5]]),
        is_draft_argmax=torch.tensor([[False], [False]]),
    )
    for rule in RULES:
        assert RULES[rule].given_text(scores).flatten().tolist() == [0, 0]
        assert RULES[rule].expected(scores).flatten().tolist() == pytest.approx([0.5, 0])


def test_expected_visits_equal_simulated_rounds():
    """Rounds played along a text with known acceptances: where they start, and what they accept."""
    rng = np.random.default_rng(0)
    length, depth, rounds = 9, 2, 40_000
    given = np.cumprod(rng.uniform(0.2, 0.9, (depth, length)), 0)
    expected, visits = expected_counts(by_response(given, np.zeros(length, dtype=int), np.arange(length), [0]))
    starts, accepted = 0, np.zeros(depth)
    for _ in range(rounds):
        at = 0
        while at < length:
            taken = int((rng.uniform() < given[:, at]).sum())
            starts, at = starts + 1, at + taken + 1
            accepted[:taken] += 1
    assert visits[0] == pytest.approx(starts / rounds, rel=0.01)
    assert expected[:, 0] == pytest.approx(accepted / rounds, rel=0.02)
