"""Every chain rule emits exactly the target: enumeration of all drafts and outcomes in float64, then verify_chain by
statistics against that enumeration. What the enumeration must reject is here too.

`tables[i]` is a model over a vocabulary of V, [V] * i + [V]: of the token after every prefix of length i.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from bebop.spec import acceptance_ratio, distributions, verify_chain
from bebop.spec.rules import block

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
RULES = ("rejection", "target_only", "block")


def random_tables(num_tables: int, vocabulary: int, seed: int, kind: str = "dense") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for i in range(num_tables):
        weight = torch.empty([vocabulary] * (i + 1), dtype=torch.float64).exponential_(generator=generator) ** 2
        if kind == "zeros":
            weight *= torch.rand(weight.shape, generator=generator) < 0.6
            weight[..., i % vocabulary] += 0.1
        elif kind == "one_hot":
            weight = torch.nn.functional.one_hot(weight.argmax(-1), vocabulary).double()
        elif kind == "ties":
            weight = torch.randint(1, 3, weight.shape, generator=generator).double()
        tables.append(weight / weight.sum(-1, keepdim=True))
    return tables


def drafts_of(rule: str, draft_tables: list[Tensor], gamma: int) -> list[tuple[tuple[int, ...], float]]:
    """Every draft of length gamma with its probability; the one of argmaxes for target_only."""
    if rule == "target_only":
        draft: tuple[int, ...] = ()
        for table in draft_tables[:gamma]:
            draft += (int(table[draft].argmax()),)
        return [(draft, 1.0)]
    drafts = []
    for draft in itertools.product(range(draft_tables[0].shape[0]), repeat=gamma):
        probability = 1.0
        for i in range(gamma):
            probability *= float(draft_tables[i][draft[: i + 1]])
        if probability > 0:
            drafts.append((draft, probability))
    return drafts


def outcomes(
    rule: str, target: list[Tensor], draft: list[Tensor], tokens: tuple[int, ...], residual=distributions.residual
) -> list[tuple[float, Tensor]]:
    """For n = 0..gamma: the probability that n drafts are accepted, and the distribution of the token after them.

    target[i], draft[i] [V]: after i tokens of this draft.
    """
    gamma = len(tokens)
    p = torch.stack([target[i][tokens[i]] for i in range(gamma)])
    if rule == "target_only":
        draft = [torch.nn.functional.one_hot(torch.tensor(y), len(target[0])).double() for y in tokens]
    q = torch.stack([draft[i][tokens[i]] for i in range(gamma)])
    if rule != "block":
        accept = [float(a) for a in acceptance_ratio(p, q)]
        finals = [residual(target[i], draft[i]) for i in range(gamma)] + [target[gamma]]
        result, reached = [], 1.0
        for n in range(gamma + 1):
            result.append((reached * (1 - accept[n] if n < gamma else 1.0), finals[n]))
            reached *= accept[n] if n < gamma else 1.0
        return result
    weight = [torch.ones((), dtype=torch.float64)]
    for i in range(gamma):
        weight.append(block.next_weight(weight[i], p[i], q[i]))
    accept = [1.0]
    accept += [float(block.pass_probability(weight[i], target[i], draft[i])) for i in range(1, gamma)]
    accept += [float(weight[gamma])]
    result, no_longer = [], 1.0  # no_longer: no longer prefix passed its test
    for n in range(gamma, -1, -1):
        final = target[gamma] if n == gamma else residual(target[n], draft[n], weight[n])
        result.append((no_longer * accept[n], final))
        no_longer *= 1 - accept[n]
    return result[::-1]


def enumerate_emitted(
    rule: str,
    target: list[Tensor],
    draft: list[Tensor],
    gamma: int,
    residual=distributions.residual,
    drawn: list[Tensor] | None = None,
) -> dict[tuple[int, ...], float]:
    """Probability of every emitted run (accepted drafts and one token more). drawn: what drafts truly come from."""
    emitted: dict[tuple[int, ...], float] = {}
    for tokens, probability in drafts_of(rule, drawn or draft, gamma):
        target_rows = [target[i][tokens[:i]] for i in range(gamma + 1)]
        draft_rows = [draft[i][tokens[:i]] for i in range(gamma)]
        for n, (chance, final) in enumerate(outcomes(rule, target_rows, draft_rows, tokens, residual)):
            for y in range(len(final)):
                run = (*tokens[:n], y)
                emitted[run] = emitted.get(run, 0.0) + probability * chance * float(final[y])
    return emitted


def joint(emitted: dict[tuple[int, ...], float], target: list[Tensor]) -> Tensor:
    """Distribution of the first gamma + 1 tokens if shorter runs continue by sampling the target."""
    length = len(target)
    total = torch.zeros([target[0].shape[0]] * length, dtype=torch.float64)
    for run, probability in emitted.items():
        rest = torch.tensor(probability, dtype=torch.float64)
        for i in range(len(run), length):
            rest = rest.unsqueeze(-1) * target[i][run]
        total[run] += rest
    return total


def target_joint(target: list[Tensor]) -> Tensor:
    total = torch.ones((), dtype=torch.float64)
    for table in target:
        total = total.unsqueeze(-1) * table
    return total


def tv(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)


def mean_accepted(emitted: dict[tuple[int, ...], float]) -> float:
    return sum(probability * (len(run) - 1) for run, probability in emitted.items())


def constant_tables(row: Tensor, num_tables: int) -> list[Tensor]:
    return [row.expand([len(row)] * i + [len(row)]) for i in range(num_tables)]


@pytest.mark.parametrize("kind", ["dense", "zeros", "one_hot", "ties", "equal", "disjoint"])
@pytest.mark.parametrize("rule", RULES)
def test_enumerated_output_is_the_target(rule, kind):
    for gamma, vocabulary, seed in [(1, 4, 0), (2, 4, 1), (3, 3, 2), (3, 3, 3)]:
        table_kind = kind if kind in ("zeros", "one_hot", "ties") else "dense"
        target = random_tables(gamma + 1, vocabulary, seed, table_kind)
        draft = random_tables(gamma, vocabulary, seed + 100, table_kind)
        if kind == "equal":
            draft = target[:gamma]
        if kind == "disjoint":
            half = torch.arange(vocabulary) < vocabulary // 2
            target = [norm(table * half) for table in target]
            draft = [norm(table * ~half) for table in draft]
        emitted = enumerate_emitted(rule, target, draft, gamma)
        assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
        assert tv(joint(emitted, target), target_joint(target)) <= 1e-12


def norm(table: Tensor) -> Tensor:
    return table / table.sum(-1, keepdim=True)


def test_block_accepts_at_least_as_many_as_rejection():
    gains = []
    for seed in range(20):
        target, draft = random_tables(4, 3, seed), random_tables(3, 3, seed + 100)
        by_block = mean_accepted(enumerate_emitted("block", target, draft, 3))
        gains.append(by_block - mean_accepted(enumerate_emitted("rejection", target, draft, 3)))
    assert min(gains) > -1e-12 and max(gains) > 0.01


def test_block_of_one_draft_is_rejection_sampling():
    target, draft = random_tables(2, 4, 7), random_tables(1, 4, 8)
    one, other = (enumerate_emitted(rule, target, draft, 1) for rule in ("block", "rejection"))
    assert all(one[run] == pytest.approx(other[run], abs=1e-15) for run in one)


def test_single_draft_acceptance_matches_the_formula_of_each_rule():
    target, draft = constant_tables(P, 2), constant_tables(Q, 1)
    assert mean_accepted(enumerate_emitted("rejection", target, draft, 1)) == pytest.approx(0.6)
    assert mean_accepted(enumerate_emitted("target_only", target, draft, 1)) == pytest.approx(0.2)


def test_residual_of_the_check_vector_and_without_mass():
    torch.testing.assert_close(distributions.residual(P, Q), torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64))
    torch.testing.assert_close(distributions.residual(P, P), P)
    without = distributions.residual(P, distributions.point_mass(torch.tensor(0), P))
    torch.testing.assert_close(without, torch.tensor([0.0, 0.6, 0.4], dtype=torch.float64))


def test_enumeration_catches_resampling_from_the_target():
    """Emitting from p after a rejection instead of norm(max(0, p - q)) gives [.40, .32, .28] for p = [.5, .3, .2]."""
    target, draft = constant_tables(P, 2), constant_tables(Q, 1)
    faulty = enumerate_emitted("rejection", target, draft, 1, residual=lambda p, q, weight=1.0: p)
    first = joint(faulty, target).sum(1)
    torch.testing.assert_close(first, torch.tensor([0.40, 0.32, 0.28], dtype=torch.float64))
    right = joint(enumerate_emitted("rejection", target, draft, 1), target).sum(1)
    torch.testing.assert_close(right, P)


@pytest.mark.parametrize("fault", ["none", "unfiltered_q"])
def test_top_k_draft_is_verified_against_the_filtered_distribution(fault):
    """Drafts come from the top 3 of 8 logits. q of all 8 makes acceptance 1.0 and the output [.4718, .3162, .2120]."""
    logits = torch.tensor([3, 2.6, 2.2, 1, 0.6, 0.2, 0, -0.4], dtype=torch.float64)
    kept = norm(torch.where(torch.arange(8) < 3, logits.exp(), 0.0))
    target = constant_tables(torch.nn.functional.pad(P, (0, 5)), 2)
    q = constant_tables(kept if fault == "none" else logits.softmax(-1), 1)
    emitted = enumerate_emitted("rejection", target, q, 1, drawn=constant_tables(kept, 1))
    first = joint(emitted, target).sum(1)[:3]
    if fault == "none":
        assert mean_accepted(emitted) == pytest.approx(0.9718, abs=5e-5)
        torch.testing.assert_close(first, P)
    else:
        assert mean_accepted(emitted) == pytest.approx(1.0)
        torch.testing.assert_close(
            first, torch.tensor([0.4718, 0.3162, 0.2120], dtype=torch.float64), atol=5e-5, rtol=0
        )


def sample_drafts(tables: list[Tensor], num: int, gamma: int, generator: torch.Generator) -> Tensor:
    tokens = torch.zeros(num, 0, dtype=torch.long)
    for table in tables[:gamma]:
        probs = table[tuple(tokens.T)] if tokens.shape[1] else table.expand(num, -1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], dim=1)
    return tokens


def rows(tables: list[Tensor], tokens: Tensor, num_rows: int) -> Tensor:
    """[num, num_rows, V]: the tables along each row of tokens."""
    found = [tables[i][tuple(tokens[:, :i].T)] if i else tables[0].expand(len(tokens), -1) for i in range(num_rows)]
    return torch.stack(found, dim=1)


def p_value(tokens: Tensor, exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square of emitted runs, padded with -1, against their exact distribution; 0 where an impossible run came."""
    runs, counts = tokens.unique(dim=0, return_counts=True)
    seen = {tuple(int(y) for y in run if y >= 0): int(n) for run, n in zip(runs, counts, strict=True)}
    possible = {run: chance for run, chance in exact.items() if chance > 0}
    if not seen.keys() <= possible.keys():
        return 0.0
    expected = torch.tensor(list(possible.values()), dtype=torch.float64)
    observed = torch.tensor([seen.get(run, 0) for run in possible], dtype=torch.float64)
    return float(chisquare(observed.numpy(), (expected / expected.sum() * observed.sum()).numpy()).pvalue)


@pytest.mark.parametrize("kind", ["dense", "zeros"])
@pytest.mark.parametrize("rule", RULES)
def test_verify_chain_samples_what_the_enumeration_says(rule, kind):
    gamma, num = 2, 200_000
    target, draft = random_tables(gamma + 1, 4, 56, kind), random_tables(gamma, 4, 57, kind)
    if rule == "target_only":
        tokens = torch.tensor(drafts_of(rule, draft, gamma)[0][0]).expand(num, -1)
    else:
        tokens = sample_drafts(draft, num, gamma, torch.Generator().manual_seed(1))
    result = verify_chain(
        rows(target, tokens, gamma + 1),
        None if rule == "target_only" else rows(draft, tokens, gamma),
        tokens,
        rule=rule,
        generator=torch.Generator().manual_seed(2),
    )
    exact = enumerate_emitted(rule, target, draft, gamma)
    assert p_value(result.tokens, exact) > 1e-3
    assert ((result.tokens >= 0).sum(1) == result.num_accepted + 1).all()
    if kind == "dense":
        other = enumerate_emitted("block" if rule == "rejection" else "rejection", target, draft, gamma)
        assert p_value(result.tokens, other) < 1e-6, "the test must tell the rules apart"


@pytest.mark.parametrize("rule", RULES)
def test_drafts_of_different_lengths_are_verified_independently(rule):
    """Rows of 2 drafts and rows of 1 in one call; each half has the distribution of its own length."""
    num = 200_000
    target, draft = random_tables(3, 4, 56), random_tables(2, 4, 57)
    if rule == "target_only":
        tokens = torch.tensor(drafts_of(rule, draft, 2)[0][0]).repeat(num, 1)
    else:
        tokens = sample_drafts(draft, num, 2, torch.Generator().manual_seed(1))
    target_rows, draft_rows = rows(target, tokens, 3), rows(draft, tokens, 2)
    tokens[1::2, 1] = -1
    result = verify_chain(target_rows, draft_rows, tokens, rule=rule, generator=torch.Generator().manual_seed(2))
    assert p_value(result.tokens[0::2], enumerate_emitted(rule, target, draft, 2)) > 1e-3
    assert p_value(result.tokens[1::2], enumerate_emitted(rule, target, draft, 1)) > 1e-3


@pytest.mark.parametrize("fault", ["resampled from p", "unfiltered q"])
def test_statistics_catch_a_biased_sampler(fault):
    """The chi-square that verify_chain passes must fail for samplers that are known to be wrong."""
    num = 200_000
    generator = torch.Generator().manual_seed(3)
    target, draft = constant_tables(P, 2), constant_tables(Q, 1)
    exact = enumerate_emitted("rejection", target, draft, 1)
    if fault == "unfiltered q":
        kept = norm(Q * torch.tensor([1.0, 0.0, 1.0]))
        tokens = torch.multinomial(kept.expand(num, -1), 1, generator=generator)
        result = verify_chain(rows(target, tokens, 2), rows(draft, tokens, 1), tokens, generator=generator).tokens
    else:
        tokens = torch.multinomial(Q.expand(num, -1), 1, generator=generator)
        accepted = torch.rand(num, generator=generator) * Q[tokens[:, 0]] < P[tokens[:, 0]]
        fresh = torch.multinomial(P.expand(num, -1), 2, replacement=True, generator=generator)
        first = torch.where(accepted, tokens[:, 0], fresh[:, 0])
        result = torch.stack([first, torch.where(accepted, fresh[:, 1], -1)], dim=1)
    assert p_value(result, exact) < 1e-6


def test_draft_accept_and_residual_draws_are_independent():
    """One noise for draft and residual biases p = [.1, .2, .3, .4] to [.101, .201, .265, .434]; apart they give p."""
    num = 400_000
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).expand(num, -1)
    q = torch.tensor([0.55, 0.25, 0.15, 0.05], dtype=torch.float64).expand(num, -1)
    generator = torch.Generator().manual_seed(5)
    noise = torch.empty_like(q).exponential_(generator=generator)
    drafts = (q / noise).argmax(-1)
    result = verify_chain(torch.stack([p, p], 1), q.unsqueeze(1), drafts.unsqueeze(1), generator=generator)
    assert tv(torch.bincount(result.tokens[:, 0], minlength=4) / num, p[0]) < 0.01

    u = torch.rand(num, generator=generator, dtype=torch.float64)
    accepted = u * q[0][drafts] < p[0][drafts]
    shared = torch.where(accepted, drafts, (distributions.residual(p, q) / noise).argmax(-1))
    frequency = torch.bincount(shared, minlength=4) / num
    torch.testing.assert_close(frequency, torch.tensor([0.101, 0.201, 0.265, 0.434]), atol=0.003, rtol=0)


def test_acceptance_and_final_token_use_different_random_numbers():
    """Were they one stream, the final token would follow from the accept draw: their dependence is tested."""
    num = 200_000
    p, q = P.expand(num, 2, 3), Q.expand(num, 1, 3)
    for token in (0, 1, 2):
        drafts = torch.full((num, 1), token)
        result = verify_chain(p, q, drafts, generator=torch.Generator().manual_seed(9))
        ratio = float(acceptance_ratio(P[token], Q[token]))
        assert float(result.num_accepted.double().mean()) == pytest.approx(ratio, abs=0.005)
        for accepted, expected in ((0, distributions.residual(P, Q)), (1, P)):
            chosen = result.tokens[result.num_accepted == accepted, accepted]
            if len(chosen):
                assert tv(torch.bincount(chosen, minlength=3) / len(chosen), expected) < 0.01
