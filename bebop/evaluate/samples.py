"""The responses of an eval, stored by temperature as they are sampled, so that a stopped run resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop.records import DraftCounts, Rollout
from bebop.store.files import plain, revive, write_text

FOLDER = "rollouts"


def write(run_dir: Path, temperature: float, made_by: str, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts/T<temperature>.jsonl in run_dir, whole or not at all. made_by: name of what they are made from."""
    lines = [{"made_from": made_by}, *(plain(rollout) for rollout in rollouts)]
    write_text(_path(run_dir, temperature), "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def read(run_dir: Path, temperature: float, made_by: str, prompts: Sequence[Sequence[int]]) -> list[Rollout] | None:
    """The responses stored for these prompts made from the same, in the prompts' order; None if there are none."""
    path = _path(run_dir, temperature)
    if not path.is_file():
        return None
    head, *lines = (revive(json.loads(line)) for line in path.read_text().splitlines())
    if head != {"made_from": made_by} or [line["prompt_ids"] for line in lines] != [list(ids) for ids in prompts]:
        return None
    return [_rollout(line) for line in lines]


def _rollout(line: dict[str, Any]) -> Rollout:
    counts = line["counts"]
    if counts is not None:
        counts = DraftCounts(**counts | {"accepted_per_depth": tuple(counts["accepted_per_depth"])})
    lists = {name: tuple(line[name]) for name in ("prompt_ids", "token_ids", "versions")}
    logprobs = None if line["logprobs"] is None else tuple(line["logprobs"])
    return Rollout(**line | lists | {"logprobs": logprobs, "counts": counts})


def _path(run_dir: Path, temperature: float) -> Path:
    short = f"{temperature:g}"
    return run_dir / FOLDER / f"T{short if float(short) == temperature else repr(temperature)}.jsonl"
