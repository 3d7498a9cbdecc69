"""GRPO whose rollouts are RheoSampling trees of bebop's own engine, on the real verl: both modes, kill and resume."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from grpo_runs import check_served, config, finish, listening, start, wait_for_step

from bebop.monitor import read_steps
from bebop.processes import marked
from bebop.rl import checkpoints

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DEPTH, BUDGET = 4, 10


def values(mode: str, **grpo: object) -> dict:
    tree = {"engine": "torch", "tree": "rheo", "tree_width": 3, "tree_depth": DEPTH, "tree_budget": BUDGET}
    return config(mode, rollout=tree, **grpo)


def check_records(run_dir: Path, steps: int) -> None:
    records = read_steps(run_dir)
    check_served(records, steps)
    for record in records:
        assert record.entropy_nats > 0 and record.tokens_per_s > 0 and record.reward_mean is not None
        counts = record.counts
        assert len(counts.accepted_per_depth) == record.num_speculative_tokens == DEPTH
        assert counts.num_draft_tokens == BUDGET * counts.num_drafts
        assert list(counts.accepted_per_depth) == sorted(counts.accepted_per_depth, reverse=True)
        assert record.acceptance_length < DEPTH + 1
        assert record.acceptance_rule == f"rheo tree of {BUDGET} nodes, 3 wide, auto leads"


@pytest.fixture(scope="module")
def killed_and_resumed(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run of 5 steps that was killed with -9 after its third, and run again to its end."""
    run_dir = tmp_path_factory.mktemp("async") / "run"
    first = start(values("colocate_async", steps=5, save_every=2), run_dir, tiny_random)
    wait_for_step(first, run_dir, 3)
    (run_dir / "listening.json").write_text(json.dumps(sorted(listening(run_dir))))
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(values("colocate_async", steps=5, save_every=2), run_dir, tiny_random)
    finish(second)
    assert not marked(run_dir)
    return run_dir


def test_async_run_on_trees_is_on_policy_logged_and_resumed(killed_and_resumed: Path):
    check_records(killed_and_resumed, steps=5)
    records = read_steps(killed_and_resumed)
    assert records[0].probs_diff_max is not None  # everything is on-policy there
    assert max(record.staleness_max for record in records) == 1
    assert "acceptance" in (killed_and_resumed / "report.html").read_text().lower()
    lines = (killed_and_resumed / "trained_prompts.jsonl").read_text().splitlines()
    trained = [prompt for line in lines for prompt in json.loads(line)["prompt_ids"]]
    assert len(trained) == len(set(trained)) == 20
    assert checkpoints.latest(killed_and_resumed) == 5


def test_nothing_of_a_run_on_trees_listens_on_another_interface(killed_and_resumed: Path):
    sockets = json.loads((killed_and_resumed / "listening.json").read_text())
    assert sockets and all(address.removeprefix("::ffff:").startswith("127.") for _, address in sockets), sockets


def test_sync_run_on_trees_ends_with_a_killed_servers_error(tiny_random: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    process = start(values("sync", steps=500, save_every=500), run_dir, tiny_random)
    wait_for_step(process, run_dir, 3)
    servers = [pid for pid in marked(run_dir) if b"TorchServer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(servers) == 1
    os.kill(servers[0], signal.SIGKILL)
    killed_at = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and time.monotonic() - killed_at < 60
    assert "actor is dead" in output or "TorchServer" in output, output
    assert not marked(run_dir)
    steps = len(read_steps(run_dir))
    check_records(run_dir, steps)
    for record in read_steps(run_dir):
        assert record.staleness_max == 0 and record.probs_diff_max <= 1e-5
