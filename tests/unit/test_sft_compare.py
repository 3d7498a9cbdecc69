"""The table of a sweep, from the summaries of its runs."""

import csv
import json

from bebop.sft.compare import TABLE, compare


def _run(folder, length, tasks):
    folder.mkdir()
    summary = {"acceptance_length": length, "acceptance_length_se": 0.01, "conditional": [0.9, 0.8]}
    summary["tasks"] = {task: {"acceptance_length": value} for task, value in tasks.items()}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_sweep_ends_in_one_table_and_a_csv(tmp_path):
    runs = [
        _run(tmp_path / "0_loss=kl", 2.5, {"b": 2.0, "a": 3.0}),
        _run(tmp_path / "1_loss=tv", 2.625, {"a": 3.25}),
    ]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in compare(runs, tmp_path).splitlines()]
    assert lines[0] == ["run", "AL", "se", "depth 1", "depth 2", "a", "b"]
    assert lines[2:] == [
        ["0_loss=kl", "2.500", "0.010", "0.900", "0.800", "3.000", "2.000"],
        ["1_loss=tv", "2.625", "0.010", "0.900", "0.800", "3.250", "–"],
    ]
    rows = list(csv.DictReader((tmp_path / TABLE).open()))
    assert [row["AL"] for row in rows] == ["2.5", "2.625"]
