"""A run's folder: what is written comes back, also after a crash and a resume."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from bebop.monitor import (
    JsonlSink,
    read_records,
    read_steps,
    step_from_json,
    step_to_json,
    write_run_json,
    write_summary,
)
from bebop.records import DraftCounts, StepRecord


def step(number: int, **fields) -> StepRecord:
    counts = DraftCounts(100, 300, (80, 48, 24))
    return StepRecord(
        **{
            "step": number,
            "entropy_nats": 0.5,
            "counts": counts,
            "num_speculative_tokens": 3,
            "acceptance_rule": "rejection",
            "temperature": 1.0,
            **fields,
        }
    )


def test_step_record_survives_json_with_nested_counts_and_extras():
    record = step(3, reward_mean=0.25, extra={"rollout/spec_accept_length": 2.5})
    line = json.loads(json.dumps(step_to_json(record), allow_nan=False))
    assert line["kind"] == "step" and line["acceptance_length"] == pytest.approx(2.52)
    assert step_from_json(line) == record


def test_step_without_speculation_survives_json():
    record = step(0, counts=None, entropy_nats=None)
    assert step_from_json(step_to_json(record)) == record


def test_non_finite_values_survive_strict_json(tmp_path):
    with JsonlSink(tmp_path) as sink:
        sink.write(step(0, probs_diff_max=math.nan, step_s=math.inf, extra={"loss": -math.inf}))
        sink.write({"kind": "sft", "step": 0, "loss": np.float32("nan"), "alpha": np.array([0.5, np.inf])})
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail)
    (record,) = read_steps(tmp_path)
    assert math.isnan(record.probs_diff_max) and record.step_s == math.inf and record.extra == {"loss": -math.inf}
    (sft,) = read_records(tmp_path, "sft")
    assert math.isnan(sft["loss"]) and sft["alpha"] == [0.5, math.inf]


def test_resumed_run_continues_after_a_torn_last_line(tmp_path):
    with JsonlSink(tmp_path) as sink:
        for number in range(3):
            sink.write(step(number))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert [record.step for record in read_steps(tmp_path)] == [0, 1]
    with JsonlSink(tmp_path) as sink:
        sink.write(step(2, reward_mean=1.0))
    assert [(record.step, record.reward_mean) for record in read_steps(tmp_path)] == [(0, None), (1, None), (2, 1.0)]


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(step_to_json(step(0))))
    with JsonlSink(tmp_path) as sink:
        sink.write(step(1))
    assert [record.step for record in read_steps(tmp_path)] == [0, 1]


def test_later_line_of_one_step_and_kind_counts(tmp_path):
    with JsonlSink(tmp_path) as sink:
        for number, reward in [(0, 0.0), (1, 0.1), (2, 0.2), (1, 0.9)]:
            sink.write(step(number, reward_mean=reward))
        sink.write({"kind": "sft", "step": 1, "loss": 0.3})
        sink.write({"kind": "note", "text": "a"})
        sink.write({"kind": "note", "text": "b"})
    assert [(record.step, record.reward_mean) for record in read_steps(tmp_path)] == [(0, 0.0), (1, 0.9), (2, 0.2)]
    assert len(read_records(tmp_path, "sft")) == 1 and len(read_records(tmp_path, "note")) == 2


def test_bad_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "note"}\n{"kind": "no\n{"kind": "note"}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: got "):
        read_records(tmp_path)


def test_record_without_a_kind_is_refused(tmp_path):
    with JsonlSink(tmp_path) as sink, pytest.raises(ValueError, match="got kind=None"):
        sink.write({"step": 1})


def test_run_json_keeps_the_first_start_on_resume(tmp_path):
    path = write_run_json(tmp_path, "grpo", {"seed": 1, "run_dir": tmp_path})
    write_run_json(tmp_path, "grpo", {"seed": 2})
    made_by = json.loads(path.read_text())
    assert made_by["command"] == "grpo" and made_by["config"] == {"seed": 1, "run_dir": str(tmp_path)}
    assert made_by["packages"]["numpy"] == np.__version__ and made_by["started_at"] and "git_revision" in made_by
    assert [start["config"]["seed"] for start in made_by["resumed"]] == [2]


def test_summary_is_replaced_whole(tmp_path):
    write_summary(tmp_path, {"a": 1, "b": math.nan})
    path = write_summary(tmp_path, {"a": np.int64(2)})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
