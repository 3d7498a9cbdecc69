"""A killed run resumes from its last complete checkpoint, and what it leaves behind is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bebop.processes import end_marked, marked
from bebop.rl import checkpoints
from bebop.store.metrics import drop_steps_after


def checkpoint(run_dir: Path, step: int, *, complete: bool = True) -> None:
    checkpoints.verl_dir(run_dir, step).mkdir(parents=True)
    checkpoints.policy_dir(run_dir, step).mkdir(parents=True)
    if complete:
        checkpoints.mark_complete(run_dir, step, submitted=step)


def test_only_a_complete_checkpoint_is_resumed(tmp_path: Path):
    assert checkpoints.latest(tmp_path) is None
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 15, complete=False)
    assert checkpoints.latest(tmp_path) == 10
    checkpoints.discard_incomplete(tmp_path)
    assert not checkpoints.verl_dir(tmp_path, 15).exists()
    assert checkpoints.complete_steps(tmp_path) == [5, 10]


def test_pruning_keeps_the_newest(tmp_path: Path):
    for step in (5, 10, 15):
        checkpoint(tmp_path, step)
    checkpoints.prune(tmp_path, keep=2)
    assert checkpoints.complete_steps(tmp_path) == [10, 15]
    assert not checkpoints.verl_dir(tmp_path, 5).exists()
    assert not checkpoints.policy_dir(tmp_path, 5).exists()


def test_lines_of_lost_steps_are_forgotten_and_others_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": "sft", "step": 90},
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2},
        {"kind": "step", "step": 3},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"kind": "st')
    drop_steps_after(path, 2, kind="step")
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:3]


def test_only_processes_of_the_run_are_ended(tmp_path: Path):
    def start(run_dir: Path) -> subprocess.Popen:
        env = os.environ | {"BEBOP_RUN": str(run_dir)}
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=True)

    mine, other = start(tmp_path / "run"), start(tmp_path / "run2")
    try:
        deadline = time.monotonic() + 10
        while marked(tmp_path / "run") != [mine.pid] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked(tmp_path / "run") == [mine.pid]
        assert end_marked(tmp_path / "run", grace_s=0.1) == 1
        assert mine.wait(5) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
