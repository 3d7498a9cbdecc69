"""The responses of an eval, stored by temperature as they are sampled, so that a stopped run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bebop.records import DraftCounts, Rollout

FOLDER = "rollouts"


def write(run_dir: Path, temperature: float, policy: str, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts/T<temperature>.jsonl in run_dir, whole or not at all. policy: checksum of what sampled them."""
    path = _path(run_dir, temperature)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    lines = [{"policy": policy}, *(asdict(rollout) for rollout in rollouts)]
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.replace(path)


def read(run_dir: Path, temperature: float, policy: str, prompts: Sequence[Sequence[int]]) -> list[Rollout] | None:
    """The responses stored for these prompts by the same policy, in the prompts' order; None if there are none."""
    path = _path(run_dir, temperature)
    if not path.is_file():
        return None
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    if head != {"policy": policy} or [line["prompt_ids"] for line in lines] != [list(ids) for ids in prompts]:
        return None
    return [_rollout(line) for line in lines]


def _rollout(line: dict) -> Rollout:
    counts = line["counts"]
    if counts is not None:
        counts = DraftCounts(**counts | {"accepted_per_depth": tuple(counts["accepted_per_depth"])})
    lists = {name: tuple(line[name]) for name in ("prompt_ids", "token_ids", "versions")}
    logprobs = None if line["logprobs"] is None else tuple(line["logprobs"])
    return Rollout(**line | lists | {"logprobs": logprobs, "counts": counts})


def _path(run_dir: Path, temperature: float) -> Path:
    return run_dir / FOLDER / f"T{temperature:g}.jsonl"
