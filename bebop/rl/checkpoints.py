"""Checkpoints of a GRPO run. A checkpoint is complete, or it is ignored.

run_dir/checkpoints/global_step_N is verl's own (model, optimizer, data position, queue of responses);
run_dir/checkpoints/step_N/policy is the policy with its heads as a Hugging Face directory; step_N/complete.json is
written last, so a run that is killed while it saves resumes from the previous checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bebop.store.files import write_json

COMPLETE = "complete.json"


def policy_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step}" / "policy"


def verl_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"global_step_{step}"


def mark_complete(run_dir: Path, step: int, **facts: object) -> None:
    """Record that both parts of the step's checkpoint are written."""
    write_json(run_dir / "checkpoints" / f"step_{step}" / COMPLETE, {"step": step, **facts})


def complete_steps(run_dir: Path) -> list[int]:
    """Steps with a complete checkpoint, in order."""
    found = []
    for mark in (run_dir / "checkpoints").glob(f"step_*/{COMPLETE}"):
        step = mark.parent.name.removeprefix("step_")
        if step.isdigit() and verl_dir(run_dir, int(step)).is_dir() and policy_dir(run_dir, int(step)).is_dir():
            found.append(int(step))
    return sorted(found)


def latest(run_dir: Path) -> int | None:
    """The step to resume from; None without a complete checkpoint."""
    steps = complete_steps(run_dir)
    return steps[-1] if steps else None


def discard_incomplete(run_dir: Path) -> None:
    """Remove checkpoints that a killed run left incomplete."""
    keep = set(complete_steps(run_dir))
    for folder in (run_dir / "checkpoints").glob("*step_*"):
        step = folder.name.rpartition("step_")[2]
        if step.isdigit() and int(step) not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; of each, complete.json first."""
    for step in complete_steps(run_dir)[:-keep]:
        folder = run_dir / "checkpoints" / f"step_{step}"
        (folder / COMPLETE).unlink()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(verl_dir(run_dir, step), ignore_errors=True)
