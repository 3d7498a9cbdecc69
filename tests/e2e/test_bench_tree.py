"""bench tree on the real engine: every variant at every temperature, with what its numbers were measured under."""

import csv
import json

import pytest
import torch

from bebop.bench.tree import stage as tree
from bebop.config import Bench, BenchConfig, Data, Model, RolloutSection, Task, TreeBench

pytestmark = pytest.mark.e2e


def test_bench_tree_measures_every_variant_and_writes_table_and_plots(tiny_random, tmp_path):
    config = BenchConfig(
        model=Model(name="hf", path=tiny_random),
        data=Data(tasks=[Task(name="chain_sum")], max_prompt_tokens=96, max_response_tokens=12),
        rollout=RolloutSection(max_model_len=128, tree_width=3, tree_depth=3, tree_budget=8),
        bench=Bench(
            suite="tree",
            batch_sizes=[1, 3],
            repeats=1,
            tree=TreeBench(leads=[0, 2], temperatures=[0.0, 1.0], num_prompts=3, score_positions=2),
        ),
    )
    summary = tree.run(config, tmp_path)
    with open(tmp_path / "tree.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["plain", "rejection", "block", "topk", "rrsw m=1", "rheo m=0", "rheo m=2"]
    assert [(row["batch_size"], row["temperature"], row["variant"]) for row in rows] == [
        (size, temperature, name) for size in ("1", "3") for temperature in ("0.0", "1.0") for name in names
    ]
    for row in rows:
        assert float(row["tokens_per_s"]) > 0 and float(row["speedup"]) > 0
        assert row["device"] and row["dtype"] == "float32" and int(row["response_tokens"]) > 0
        is_tree = row["method"] in ("topk", "rrsw", "rheo")
        assert (row["gain"] != "") == (row["scored"] != "") == is_tree
        assert (int(row["rounds"]) > 0) == (row["variant"] != "plain")
        if not torch.cuda.is_available():
            assert 0.0 < float(row["rules_share"]) < 1.0
        assert row["same_text"] == ("1.0" if row["temperature"] == "0.0" else "")
        if is_tree:
            assert 1.0 <= float(row["scored"]) <= 4.0 and row["budget"] == "8"
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == summary["rows"]
    assert {path.name for path in tmp_path.glob("*.png")} == {"al_by_temperature.png", "al_by_leads.png"}
