"""Slopes of the acceptance length on entropy: the value, and an interval that knows of clusters."""

import numpy as np
import pytest

from bebop.config import Data, EvalConfig, Model, RolloutSection, Task, check
from bebop.errors import ConfigError
from bebop.evaluate.slopes import over_temperatures, over_tokens


def _clustered(rng, prompts=80, each=30, slope=-0.5, shared=0.3):
    prompt = np.repeat(np.arange(prompts), each)
    entropy = rng.uniform(0, 1, prompts)[prompt] + rng.uniform(0, 0.2, prompts * each)
    noise = shared * rng.standard_normal(prompts)[prompt] + 0.1 * rng.standard_normal(prompts * each)
    return entropy, 3.5 + slope * entropy + noise, prompt


def test_token_slope_interval_covers_with_noise_shared_by_prompt():
    """Of 95 % intervals 9 in 10 cover here; those of independent tokens cover less than half."""
    rng, covered, naive = np.random.default_rng(0), 0, 0
    for _ in range(100):
        entropy, length, prompt = _clustered(rng)
        found = over_tokens(entropy, length, prompt)
        alone = over_tokens(entropy, length, np.arange(len(entropy)) // 2)
        covered += found.low <= -0.5 <= found.high
        naive += alone.low <= -0.5 <= alone.high
    assert covered >= 88
    assert naive < 60


def test_an_exact_line_gives_slope_relative_and_intercept():
    entropy = np.linspace(0, 1, 30)
    found = over_tokens(entropy, 3 - 0.5 * entropy, np.repeat(np.arange(10), 3))
    assert (found.slope, found.intercept) == pytest.approx((-0.5, 3))
    assert found.relative == pytest.approx(-0.5 / 2.75)
    assert (found.low, found.high) == pytest.approx((-0.5, -0.5))


def test_the_slope_over_temperatures_is_that_of_their_means():
    rng = np.random.default_rng(1)
    sweep = {}
    for temperature, mean in ((0.5, 0.1), (1.0, 0.3), (1.5, 0.7)):
        prompt = np.repeat(np.arange(40), 10)
        entropy = mean + 0.02 * rng.standard_normal(400)
        sweep[temperature] = (entropy, 3.6 - 0.8 * mean + 0.1 * rng.standard_normal(400), prompt)
    found = over_temperatures(sweep, range(40))
    h, y = (np.array([values[i].mean() for values in sweep.values()]) for i in (0, 1))
    assert found.slope == pytest.approx(np.polyfit(h, y, 1)[0])
    assert found.low < -0.8 < found.high and found.high - found.low < 0.2
    assert found.n == 3


def test_too_little_is_undetermined():
    two = {1.0: (np.ones(4), np.ones(4), np.arange(4)), 2.0: (np.ones(4), np.ones(4), np.arange(4))}
    assert over_temperatures(two, range(4)).status == "undetermined"
    assert over_tokens(np.ones(9), np.arange(9.0), np.arange(9)).status == "undetermined"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"temperature": 0.0}}, r"rollout.temperature: got 0.0 in eval"),
        ({"rollout": {"top_p": 0.9}}, r"rollout.top_p: got 0.9 in eval"),
        ({"rollout": {"num_speculative_tokens": 4}}, r"num_speculative_tokens: got 4, expected at most depth=3"),
        ({"temperatures": [1.0, 1.0]}, r"temperatures: got \[1.0, 1.0\]"),
        ({"temperatures": [0.0]}, r"temperatures"),
    ],
)
def test_unscorable_eval_is_refused_before_loading(changes, message):
    whole = EvalConfig(
        model=Model(name="tiny"), data=Data(tasks=[Task(name="chain_sum")]), rollout=RolloutSection()
    ).model_dump()
    whole["rollout"].update(changes.get("rollout", {}))
    whole["temperatures"] = changes.get("temperatures")
    with pytest.raises(ConfigError, match=message):
        check("eval", whole)
