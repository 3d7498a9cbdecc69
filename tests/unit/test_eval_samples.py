"""The responses of an eval on disk: what comes back, and when it does not."""

from __future__ import annotations

import pytest

from bebop.evaluate import samples
from bebop.records import DraftCounts, Rollout


@pytest.mark.parametrize("counts", [None, DraftCounts(3, 9, (2, 1, 0)), DraftCounts(3, 9, (2, 1, 0), True)])
@pytest.mark.parametrize("logprobs", [None, (-0.1, -0.25)])
def test_responses_come_back_as_they_were(tmp_path, counts, logprobs):
    made = [Rollout("a", (1, 2), (3, 4), logprobs, "stop", (0, 0), counts)]
    samples.write(tmp_path, 0.7, "policy", made)
    assert samples.read(tmp_path, 0.7, "policy", [[1, 2]]) == made


def test_another_policy_temperature_or_prompt_is_sampled_anew(tmp_path):
    made = [Rollout("a", (1, 2), (3,), None, "length", (0,))]
    samples.write(tmp_path, 0.7, "policy", made)
    assert samples.read(tmp_path, 0.7, "another", [[1, 2]]) is None
    assert samples.read(tmp_path, 1.0, "policy", [[1, 2]]) is None
    assert samples.read(tmp_path, 0.7, "policy", [[1, 3]]) is None
    assert samples.read(tmp_path, 0.7, "policy", [[1, 2], [1, 2]]) is None
    assert [path.name for path in (tmp_path / samples.FOLDER).iterdir()] == ["T0.7.jsonl"]
