"""doctor's own arithmetic: it must pass what is lossless and fail what is not."""

import numpy as np
import pytest
import torch

from bebop.doctor import exact
from bebop.doctor.checks import check_rule
from bebop.policies import random_checkpoint
from bebop.spec import RULES


def draws(probs, num, seed=0):
    flat = np.random.default_rng(seed).multinomial(num, probs.reshape(-1))
    return flat.reshape(probs.shape)


def random_joint(seed, size=4):
    probs = np.random.default_rng(seed).dirichlet(np.ones(size**3))
    return probs.reshape(size, size, size)


def test_samples_of_the_distribution_pass():
    probs = random_joint(0)
    assert exact.chi_square(draws(probs, 4000), probs)[0] > 1e-3


def test_samples_of_another_distribution_fail():
    assert exact.chi_square(draws(random_joint(1), 4000), random_joint(0))[0] < 1e-9


def test_p_values_are_uniform_under_the_truth():
    probs = random_joint(2)
    values = [exact.chi_square(draws(probs, 3000, seed), probs)[0] for seed in range(200)]
    assert 0.4 < np.mean(values) < 0.6
    assert np.mean(np.array(values) < 0.1) < 0.2


def test_a_sample_that_cannot_be_fails_whatever_the_rest_says():
    probs = random_joint(3)
    probs[0, 0, 0] = 0
    probs /= probs.sum()
    counts = draws(probs, 4000)
    counts[0, 0, 0] = 1
    assert exact.chi_square(counts, probs)[0] == 0.0


def test_tally_counts_first_three_tokens():
    counts = exact.tally([(0, 1, 2, 3), (0, 1, 2), (1, 1, 1)], 4)
    assert counts[0, 1, 2] == 2
    assert counts.sum() == 3


def test_joint_is_a_distribution_that_sharpens_with_temperature(tmp_path):
    path = random_checkpoint(tmp_path / "p", vocab=8, seed=1)
    warm, cold = exact.joint(path, (1, 2, 3, 4), 1.0), exact.joint(path, (1, 2, 3, 4), 0.7)
    for probs in (warm, cold):
        assert probs.shape == (8, 8, 8)
        assert abs(probs.sum() - 1) < 1e-12
    assert cold.max() > warm.max()
    assert exact.total_variation(warm, cold) > 0.05


def test_joint_agrees_with_one_forward_per_prefix(tmp_path):
    from transformers import Qwen2ForCausalLM

    path = random_checkpoint(tmp_path / "p", vocab=8, seed=1)
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    prompt, tokens, wanted = [1, 2, 3, 4], (5, 0, 7), 1.0
    for i, token in enumerate(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(tokens[:i])])).logits[0, -1]
        wanted *= float(torch.softmax(logits / 0.7, -1)[token])
    assert exact.joint(path, prompt, 0.7)[tokens] == pytest.approx(wanted, rel=1e-9)


def test_acceptance_rules_pass_their_enumeration():
    assert all(row.passed for row in check_rule(seed=0))


def test_enumeration_notices_a_residual_that_ignores_the_draft(monkeypatch):
    for rule in RULES:
        monkeypatch.setattr(type(RULES[rule]), "after_rejection", lambda self, target, *_: target)
    assert not any(row.passed for row in check_rule(seed=0))
