"""bench kernels: implementations and baselines that run here, in tables, a CSV that grows, and a summary."""

from __future__ import annotations

import csv
import json

import pytest

from bebop.cli import main

pytestmark = pytest.mark.e2e


def test_bench_kernels_measures_implementations_and_baselines_and_appends(tmp_path, capfd):
    words = ["bench", "kernels", f"run_dir={tmp_path / 'run'}", "bench.repeats=1", "bench.kernels.width=16"]
    words += ["bench.kernels.rows=[4,8]", "bench.kernels.vocab_sizes=[1000]", "bench.kernels.depth=2"]
    assert main(words) == 0
    shown = capfd.readouterr().out
    with open(tmp_path / "run" / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["rows"]) == len(rows)
    for kernel in ("overlap", "linear"):
        for size in ("4", "8"):
            names = {row["implementation"] for row in rows if (row["kernel"], row["rows"]) == (kernel, size)}
            assert {"cpu", "reference", "eager"} <= names
        for baseline in ("compile", "speculators", "liger", "triton"):
            measured = any(row["implementation"] == baseline and row["kernel"] == kernel for row in rows)
            assert measured or summary["left_out"][f"{kernel} {baseline}"]
    names = {row["implementation"] for row in rows if row["kernel"] == "topk"}
    assert names == {"cpu", "reference", "eager", "torch_topk"} and summary["left_out"]["topk triton"]
    for row in rows:
        assert 0 < float(row["fastest_ms"]) <= float(row["median_ms"]) <= float(row["slowest_ms"])
        assert float(row["peak_mib"]) >= 0 and float(row["over_floor"]) > 0
        assert row["device"] and "torch 2" in row["versions"] and row["dtype"]
    assert "forward and backward" in shown and "left out: linear speculators" in shown
    assert main(words) == 0
    with open(tmp_path / "run" / "bench.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(rows)


def test_every_suite_of_the_config_has_its_module():
    import importlib
    from typing import get_args

    from bebop.bench import SUITES
    from bebop.config import Bench

    assert set(SUITES) == set(get_args(Bench.model_fields["suite"].annotation))
    for module in SUITES.values():
        assert callable(importlib.import_module(module).run)
