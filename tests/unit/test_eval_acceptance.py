"""Expected acceptance by every rule from one scoring pass, against enumeration and the sampling rules themselves."""

import itertools

import numpy as np
import pytest
import torch

from bebop.evaluate.agreement import _along, _by_response
from bebop.losses import accepted_at_anchors, accepted_given_text
from bebop.spec import verify_chain

V, K = 3, 3


def _model(seed):
    """p, q: dicts from a prefix to its float64 distribution, for all prefixes shorter than K."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for n in range(K) for prefix in itertools.product(range(V), repeat=n)]

    def draw():
        return {x: torch.softmax(2 * torch.randn(V, generator=generator, dtype=torch.float64), 0) for x in prefixes}

    return draw(), draw()


def _texts(p, q):
    """Every text of K tokens as an anchor, its probability under p, and its statistics [K,N]."""
    texts = list(itertools.product(range(V), repeat=K))
    prob = torch.tensor([np.prod([p[t[:i]][t[i]].item() for i in range(K)]) for t in texts], dtype=torch.float64)
    target = torch.stack([torch.stack([p[t[:i]][t[i]] for t in texts]) for i in range(K)]).log()
    draft = torch.stack([torch.stack([q[t[:i]][t[i]] for t in texts]) for i in range(K)]).log()
    alpha = torch.stack([torch.stack([torch.minimum(p[t[:i]], q[t[:i]]).sum() for t in texts]) for i in range(K)])
    return prob, alpha, target, draft


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
    prob, alpha, target, draft = _texts(p, q)
    assert prob.sum().item() == pytest.approx(1)
    exact = _block_by_enumeration(p, q)
    found = accepted_at_anchors(alpha, target, draft, rule="block") @ prob
    assert found.tolist() == pytest.approx(exact, abs=1e-12)
    without_control = accepted_given_text(target, draft, rule="block") @ prob
    assert without_control.tolist() == pytest.approx(exact, abs=1e-12)
    rejection = accepted_at_anchors(alpha, target, draft) @ prob
    assert (found >= rejection - 1e-12).all() and found[0].item() == pytest.approx(rejection[0].item())
    assert found.sum() > rejection.sum() + 1e-3, "block verification accepts more"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_estimates_agree_with_the_rules_that_the_engines_run(rule):
    """200,000 drafts through verify_chain."""
    p, q = _model(7)
    prob, alpha, target, draft = _texts(p, q)
    expected = accepted_at_anchors(alpha, target, draft, rule=rule) @ prob
    generator = torch.Generator().manual_seed(0)
    texts = list(itertools.product(range(V), repeat=K))
    drawn = torch.tensor([np.prod([q[t[:i]][t[i]].item() for i in range(K)]) for t in texts])
    number = torch.multinomial(drawn, 200_000, replacement=True, generator=generator)
    end = torch.full((V,), 1 / V, dtype=torch.float64)
    targets = torch.stack([torch.stack([*(p[t[:i]] for i in range(K)), end]) for t in texts])
    drafts = torch.stack([torch.stack([q[t[:i]] for i in range(K)]) for t in texts])
    result = verify_chain(targets[number], drafts[number], torch.tensor(texts)[number], rule=rule, generator=generator)
    for j in range(K):
        share = (result.num_accepted > j).double().mean().item()
        assert share == pytest.approx(expected[j].item(), abs=4 * (0.25 / 200_000) ** 0.5)


def test_the_known_bias_of_the_product_form():
    """On a chain of two equal positions P, Q, accepted tokens follow min(p, q): the weighted form sees it."""
    p, q = _model(1)
    prob, alpha, target, draft = _texts(p, q)
    exact = np.zeros(K)
    for j in range(1, K + 1):
        for prefix in itertools.product(range(V), repeat=j):
            exact[j - 1] += np.prod([min(p[prefix[:i]][prefix[i]], q[prefix[:i]][prefix[i]]).item() for i in range(j)])
    assert (accepted_at_anchors(alpha, target, draft) @ prob).tolist() == pytest.approx(exact, abs=1e-12)
    assert abs((alpha.cumprod(0) @ prob)[2].item() - exact[2]) > 1e-3


def test_impossible_tokens_carry_no_weight():
    alpha = torch.tensor([[0.5], [0.5]])
    target, draft = torch.tensor([[-torch.inf], [-1.0]]), torch.tensor([[-torch.inf], [-2.0]])
    for rule in ("rejection", "block"):
        assert accepted_given_text(target, draft, rule=rule).flatten().tolist() == [0, 0]
        assert accepted_at_anchors(alpha, target, draft, rule=rule).flatten().tolist() == pytest.approx([0.5, 0])
    with pytest.raises(ValueError, match="rule='greedy'"):
        accepted_given_text(target, draft, rule="greedy")


def test_expected_visits_equal_simulated_rounds():
    """Rounds played along a text with known acceptances: where they start, and what they accept."""
    rng = np.random.default_rng(0)
    length, depth, rounds = 9, 2, 40_000
    given = np.cumprod(rng.uniform(0.2, 0.9, (depth, length)), 0)
    expected, visits = _along(_by_response(given, np.zeros(length, dtype=int), np.arange(length), [0]))
    starts, accepted = 0, np.zeros(depth)
    for _ in range(rounds):
        at = 0
        while at < length:
            taken = int((rng.uniform() < given[:, at]).sum())
            starts, at = starts + 1, at + taken + 1
            accepted[:taken] += 1
    assert visits[0] == pytest.approx(starts / rounds, rel=0.01)
    assert expected[:, 0] == pytest.approx(accepted / rounds, rel=0.02)
