"""bench on the real engine: both kinds of decoding in one run, in a table that keeps its conditions."""

import csv
import json

import pytest

from bebop import bench
from bebop.config import Bench, BenchConfig, Data, Model, RolloutSection, Task
from bebop.config.draft_schedule import k_for

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def planned(tiny_random, tmp_path_factory):
    """The folder and the summary of one bench."""
    folder = tmp_path_factory.mktemp("bench")
    config = BenchConfig(
        model=Model(name="hf", path=tiny_random),
        data=Data(tasks=[Task(name="chain_sum")], max_response_tokens=48),
        rollout=RolloutSection(max_model_len=256, kv_cache_gib=0.25, max_num_seqs=8, num_speculative_tokens=2),
        bench=Bench(batch_sizes=[1, 4], repeats=2),
    )
    return folder, bench.run(config, folder)


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_bench_measures_both_engines_at_each_batch_size(planned):
    folder, summary = planned
    rows = table(folder / "bench.csv")
    assert [(row["batch_size"], row["speculation"]) for row in rows] == [
        ("1", "none"), ("1", "mtp"), ("4", "none"), ("4", "mtp"),
    ]  # fmt: skip
    for row in rows:
        assert float(row["tokens_per_s"]) > 0 and float(row["decode_tokens_per_s"]) > 0
        assert row["device"] and row["vllm"] and row["dtype"] == "float32"
        assert (row["acceptance_length"] == "") == (row["k"] == "0")
    assert float(rows[0]["speedup"]) == float(rows[0]["decode_speedup"]) == 1.0
    assert json.loads((folder / "summary.json").read_text())["rows"] == summary["rows"]


def test_plan_times_every_length_and_measures_its_schedule(planned):
    folder, summary = planned
    plan = table(folder / "plan.csv")
    assert [(row["batch_size"], row["k"]) for row in plan] == [
        (size, k) for size in ("1", "4") for k in ("none", "0", "1", "2")
    ]
    assert all(0 < float(row["floor_ms"]) < float(row["step_ms"]) for row in plan)
    assert (folder / "plan.png").stat().st_size > 5000
    schedule = RolloutSection(draft_schedule=folder / "schedule.json").draft_schedule
    chosen = {row["batch_size"]: int(row["k"]) for row in plan if row["chosen"] == "True"}
    for row in table(folder / "bench.csv"):
        if row["speculation"] == "mtp":
            assert k_for(int(row["batch_size"]), schedule) == int(row["k"]) == chosen[row["batch_size"]]
    # random heads accept little: where their drafts pay less than they cost, the plan says so
    pays = [float(row["speedup"]) > 1.02 for row in plan if row["k"] in ("1", "2")]
    assert any(pays) or "speculation does not pay" in summary["verdict"]
