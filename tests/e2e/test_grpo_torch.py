"""GRPO whose rollouts are RheoSampling trees of bebop's own engine, on the real verl: both modes, kill and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bebop.monitor import read_steps
from bebop.processes import marked
from bebop.rl import checkpoints

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

START_UP_S = 300.0
DEPTH, BUDGET = 4, 10
RUN = """
import json, sys
from pathlib import Path
from bebop.config import check
from bebop.rl import run
values, run_dir, policy = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
print(json.dumps(run(check("grpo", values), run_dir, policy_dir=policy), default=str))
"""


def start(run_dir: Path, policy: Path, mode: str, **grpo: object) -> subprocess.Popen:
    values = {
        "model": {"name": "tiny"},
        "data": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": 96, "max_response_tokens": 32},
        "rollout": {
            **{"engine": "torch", "tree": "rheo", "tree_width": 3, "tree_depth": DEPTH, "tree_budget": BUDGET},
            **{"max_model_len": 160, "max_num_seqs": 16, "temperature": 0.9},
        },
        "trainer": {"mode": mode},
        "logger": {"wandb": "disabled"},
        "grpo": {
            **{"prompts_per_step": 4, "group_size": 4, "lr": 1e-3, "adam_eps": 1e-3},
            "verl_overrides": [f"reward.custom_reward_function.path='{Path(__file__).with_name('grpo_reward.py')}'"],
            **grpo,
        },
    }
    words = [sys.executable, "-c", RUN, json.dumps(values), str(run_dir), str(policy)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + START_UP_S
    while len(read_steps(run_dir)) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no step {step}: {process.communicate()[0]}\n{(run_dir / 'grpo.log').read_text()[-4000:]}")
        time.sleep(0.1)


def check_records(run_dir: Path, steps: int) -> None:
    records = read_steps(run_dir)
    assert [record.step for record in records] == list(range(1, steps + 1))
    for record in records:
        assert record.entropy_nats > 0 and record.tokens_per_s > 0 and record.reward_mean is not None
        counts = record.counts
        assert len(counts.accepted_per_depth) == record.num_speculative_tokens == DEPTH
        assert counts.num_draft_tokens == BUDGET * counts.num_drafts > 0
        assert list(counts.accepted_per_depth) == sorted(counts.accepted_per_depth, reverse=True)
        assert 1 < record.acceptance_length < DEPTH + 1
        assert record.acceptance_rule == f"rheo tree of {BUDGET} nodes, 3 wide, auto leads"
        assert record.heads_checksum_engine == record.heads_checksum_trainer
        assert record.probs_diff_max is None or record.probs_diff_max <= 1e-5
    assert len({record.backbone_checksum for record in records}) == steps  # the policy moved at every step
    assert len({record.heads_checksum_engine for record in records}) == 1  # its frozen heads did not


@pytest.fixture(scope="module")
def killed_and_resumed(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run of 5 steps that was killed with -9 after its third, and run again to its end."""
    run_dir = tmp_path_factory.mktemp("async") / "run"
    first = start(run_dir, tiny_random, "colocate_async", steps=5, save_every=2)
    wait_for_step(first, run_dir, 3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = start(run_dir, tiny_random, "colocate_async", steps=5, save_every=2)
    output, _ = second.communicate(timeout=START_UP_S)
    assert second.returncode == 0, output
    assert not marked(run_dir)
    return run_dir


def test_async_run_on_trees_is_on_policy_logged_whole_and_resumed(killed_and_resumed: Path):
    check_records(killed_and_resumed, steps=5)
    records = read_steps(killed_and_resumed)
    assert records[0].probs_diff_max is not None  # everything is on-policy there
    assert max(record.staleness_max for record in records) == 1
    assert "acceptance" in (killed_and_resumed / "report.html").read_text().lower()
    lines = (killed_and_resumed / "trained_prompts.jsonl").read_text().splitlines()
    trained = [prompt for line in lines for prompt in json.loads(line)["prompt_ids"]]
    assert len(trained) == len(set(trained)) == 20
    assert checkpoints.latest(killed_and_resumed) == 5


def test_sync_run_on_trees_is_on_policy_and_a_killed_server_ends_it_with_its_error(tiny_random: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    process = start(run_dir, tiny_random, "sync", steps=500, save_every=500)
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
