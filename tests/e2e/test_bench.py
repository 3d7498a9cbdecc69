"""bench on the real engine: both kinds of decoding in one run, in a table that keeps its conditions."""

import csv
import json

import pytest

from bebop import bench
from bebop.config import Bench, BenchConfig, Data, Model, RolloutSection, Task

pytestmark = pytest.mark.e2e


def test_bench_measures_both_kinds_at_each_batch_size_and_writes_their_conditions(tiny_random, tmp_path):
    config = BenchConfig(
        model=Model(name="hf", path=tiny_random),
        data=Data(tasks=[Task(name="chain_sum")], max_response_tokens=24),
        rollout=RolloutSection(max_model_len=256, kv_cache_gib=0.25, max_num_seqs=8),
        bench=Bench(batch_sizes=[1, 4], repeats=1),
    )
    summary = bench.run(config, tmp_path)
    with open(tmp_path / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch_size"], row["speculation"]) for row in rows] == [
        ("1", "none"), ("1", "mtp"), ("4", "none"), ("4", "mtp"),
    ]  # fmt: skip
    for row in rows:
        assert float(row["tokens_per_s"]) > 0
        assert row["device"] and row["vllm"] and row["dtype"] == "float32"
        assert (row["acceptance_length"] == "") == (row["speculation"] == "none")
    assert float(rows[0]["speedup"]) == 1.0
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == summary["rows"]
