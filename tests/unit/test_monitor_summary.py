"""A run's summary out of its records alone, and the table that the console shows."""

from __future__ import annotations

import io
import json
import math

import pytest

from bebop.monitor import (
    JsonlSink,
    format_table,
    print_table,
    state_of,
    summarise,
    write_report,
    write_run_json,
    write_summary,
)
from bebop.records import DraftCounts, StepRecord


def write_run(run_dir, num_steps: int = 40) -> None:
    """Acceptance length 2.9 - .5 per nat over .4, plus a little scatter; reward from 0 to .39."""
    with JsonlSink(run_dir) as sink:
        for t in range(num_steps):
            entropy = 0.4 + 0.02 * (t % 7) - 0.001 * t
            accepted = round(1000 * (1.9 - 0.5 * (entropy - 0.4))) + (t % 3) - 1
            counts = DraftCounts(1000, 3000, (1000, accepted - 1000, 0))
            sink.write(StepRecord(t, entropy, counts, 3, "rejection", 1.0, reward_mean=t / 100))


def test_summary_has_reward_acceptance_slope_and_decision(tmp_path):
    write_run(tmp_path)
    write_run_json(tmp_path, "grpo", {"monitor": {"early_steps": 12, "min_steps": 8, "min_mismatch": 0.1}})
    summary = summarise(tmp_path)
    assert summary["reward_first"] == pytest.approx(0.02) and summary["reward_last"] == pytest.approx(0.37)
    assert summary["acceptance_length_steps"] == [35, 39] and summary["counts"]["num_drafts"] == 5000
    accepted = sum(summary["counts"]["accepted_per_depth"])
    assert summary["acceptance_length"] == pytest.approx(1 + accepted / 5000)
    assert summary["slope"] == pytest.approx(-0.5, abs=0.01)
    assert summary["slope_low"] < summary["slope"] < summary["slope_high"] and summary["slope_steps"] == 40
    assert summary["decision"] == "keep the heads" and summary["decision_update"] is False
    assert (
        summary["decision_evidence"]["early_steps"] == [0, 11] and summary["decision_evidence"]["min_mismatch"] == 0.1
    )
    json.dumps(json.loads(write_summary(tmp_path, summary).read_text()))


def test_engine_with_other_heads_gives_both_checksums(tmp_path):
    def record(step: int, engine: str | None, gap: float | None = 1e-6) -> StepRecord:
        counts = DraftCounts(100, 300, (80, 48, 24))
        return StepRecord(step, 0.4, counts, 3, "rejection", 1.0, probs_diff_max=gap,
                          heads_checksum_trainer="aaaa", heads_checksum_engine=engine)  # fmt: skip

    with JsonlSink(tmp_path) as sink:
        sink.write(record(0, None, None))
        assert summarise(tmp_path)["heads_checksums_equal"] is None and summarise(tmp_path)["probs_diff_max"] is None
        sink.write(record(1, "aaaa"))
        summary = summarise(tmp_path)
        assert (
            summary["heads_checksums_equal"] is True and summary["alarms"] == [] and summary["probs_diff_max"] == 1e-6
        )
        sink.write(record(2, "bbbb", math.nan))
    summary = summarise(tmp_path)
    assert summary["heads_checksums_equal"] is False and math.isnan(summary["probs_diff_max"])
    assert (
        "first at step 2: engine bbbb, trainer aaaa" in summary["alarms"][0] and "nan at step 2" in summary["alarms"][1]
    )
    assert "Alarm." in write_report(tmp_path).read_text()


def test_summary_without_steps_has_no_data_instead_of_zeros(tmp_path):
    with JsonlSink(tmp_path) as sink:
        sink.write({"kind": "sft", "step": 1, "loss": 0.5})
    summary = summarise(tmp_path)
    for key in (
        "reward_first",
        "reward_last",
        "acceptance_length",
        "slope",
        "slope_low",
        "slope_high",
        "decision_update",
    ):
        assert summary[key] is None, key
    assert summary["decision"] == "undetermined" and summary["decision_reason"].startswith("no data")


def test_entropy_range_comes_from_config_then_records_then_checkpoint(tmp_path):
    assert state_of(tmp_path).entropy_range is None
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "bebop.json").write_text('{"entropy_range": [0.1, 0.9]}')
    assert state_of(tmp_path).entropy_range == (0.1, 0.9)
    with JsonlSink(tmp_path) as sink:
        sink.write({"kind": "monitor", "entropy_range": [0.2, 0.8]})
    assert state_of(tmp_path).entropy_range == (0.2, 0.8)
    write_run_json(tmp_path, "grpo", {"monitor": {"entropy_range": [0.3, 0.7]}})
    assert state_of(tmp_path).entropy_range == (0.3, 0.7)


def test_table_aligns_columns_and_shows_missing_values_as_dashes():
    rows = [{"loss": "e2e_tv", "length": 2.8123}, {"loss": "ce", "length": None}, {"loss": "kl", "length": 12.5}]
    header, rule, *lines = format_table(rows).splitlines()
    assert header.split() == ["loss", "length"] and set(rule) == {"-", " "}
    assert [line.split() for line in lines] == [["e2e_tv", "2.812"], ["ce", "–"], ["kl", "12.500"]]
    assert len({len(line) for line in [header, *lines]}) == 1, "numbers are not aligned right"
    out = io.StringIO()
    print_table([("reward", "0.5"), ("acceptance length", "2.80")], title="Result", file=out)
    assert out.getvalue() == "Result\nreward             0.5\nacceptance length  2.80\n"
    with pytest.raises(ValueError, match=r"got lengths \[1, 2\]"):
        format_table([(1, 2), (1,)])
