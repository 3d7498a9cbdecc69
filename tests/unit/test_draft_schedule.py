"""Draft length by batch size: what a schedule says, and what is no schedule."""

import json

import pytest

from bebop.config import RolloutSection, check
from bebop.config.draft_schedule import from_sizes, k_for, parse, vllm_ranges
from bebop.engines.vllm_engine.arguments import engine_arguments
from bebop.errors import ConfigError

SCHEDULE = {"1-16": 3, "64-128": 2, "256+": 0}


def test_a_gap_keeps_the_k_of_the_range_below_it():
    assert [k_for(batch, SCHEDULE) for batch in (1, 16, 17, 64, 200, 256)] == [3, 3, 3, 2, 2, 0]


def test_vllm_reads_the_schedule_as_we_do():
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    for limit in (8, 100, 300):
        lookup = build_dynamic_sd_schedule_lookup(vllm_ranges(SCHEDULE, limit), limit, 3)
        assert lookup[1:] == [k_for(batch, SCHEDULE) for batch in range(1, limit + 1)]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "expected ranges"),
        ({"2+": 3}, "begin at batch size 1"),
        ({"1-8": 3, "8-16": 2}, "'8-16' after '1-8'"),
        ({"1+": 3, "64+": 0}, "'64\\+' after '1\\+'"),
        ({"1-16": 3, "9-4": 0}, "'9-4', which ends before it begins"),
        ({"1-x": 3}, "got '1-x', expected a range"),
        ({"0-4": 3}, "got '0-4', expected a range"),
        ({"1+": -1}, "got -1 for"),
        ({"1+": 1.5}, "got 1.5 for"),
        ({"1+": True}, "got True for"),
        ({"1+": 4}, "at most rollout.num_speculative_tokens=3"),
    ],
)
def test_what_is_no_schedule_is_refused_by_its_fault(schedule, message):
    with pytest.raises(ValueError, match=message):
        RolloutSection(draft_schedule=schedule)


@pytest.mark.parametrize("other", [{"speculation": "none"}, {"tree": "rheo"}])
def test_a_schedule_that_nothing_would_follow_is_refused(other):
    with pytest.raises(ValueError, match=r"draft_schedule: got 1\+:2 with rollout\."):
        RolloutSection(draft_schedule={"1+": 2}, **other)


def test_a_file_stands_for_the_schedule_in_it(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps({"schedule": SCHEDULE, "model": "any"}))
    rollout = RolloutSection(draft_schedule=path)
    assert rollout.draft_schedule == RolloutSection(draft_schedule=str(path)).draft_schedule == SCHEDULE
    assert rollout.acceptance_rule == "rejection, k by batch 1-16:3 64-128:2 256+:0"  # pooled with nothing else
    path.write_text("{")
    with pytest.raises(ValueError, match=r"schedule\.json"):
        RolloutSection(draft_schedule=path)
    with pytest.raises(ValueError, match="No such file"):
        RolloutSection(draft_schedule=tmp_path / "absent.json")


def test_the_engine_is_told_the_schedule_and_eval_refuses_it(tmp_path):
    from bebop.cli import compose
    from bebop.config.overrides import parse as words

    rollout = RolloutSection(draft_schedule={"1-4": 2, "5+": 0}, max_num_seqs=8)
    (tmp_path / "config.json").write_text("{}")
    told = engine_arguments(rollout, tmp_path, seed=0, dtype="float32")["speculative_config"]
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 4, 2], [5, 8, 0]]
    asked = words("eval", ["rollout.draft_schedule={1-4:2,5+:0}"])
    with pytest.raises(ConfigError, match="draft_schedule: got a schedule in eval"):
        check("eval", compose("eval", asked))


def test_best_lengths_become_a_schedule_that_gives_them_back():
    best = {1: 3, 8: 3, 16: 1, 64: 0, 128: 0}
    schedule = from_sizes(best)
    assert schedule == {"1-15": 3, "16-63": 1, "64+": 0}
    assert {size: k_for(size, schedule) for size in best} == best
    assert from_sizes({4: 2}) == {"1+": 2}
    assert parse(from_sizes({1: 3, 2: 0}))[0].last == 1
