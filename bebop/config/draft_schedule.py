"""Draft length by batch size: `{"1-16": 3, "64-128": 2, "256+": 0}`.

Drafting replaces several target forwards by one wider forward. That pays only if the batch leaves part of the machine
idle, so the best k decreases as the batch grows. A range is "a-b", "a" or, as the last one, "a+". Batch sizes between
two ranges, and beyond the last, take the k of the range below them. Pure functions, used by config and engines.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bebop.errors import BadInput

KEY = "rollout.draft_schedule"


class Range(NamedTuple):
    """Batch sizes from first to last, both included (last None: no end), and their draft length."""

    first: int
    last: int | None
    k: int


def parse(schedule: Mapping[str, int]) -> tuple[Range, ...]:
    """Ranges in increasing order. Raises ValueError for an invalid range, an overlap, or batch size 1 without a k."""
    if not isinstance(schedule, Mapping) or not schedule:
        raise BadInput(f'{KEY}: got {schedule!r}, expected ranges of batch sizes such as {{"1-16": 3, "17+": 0}}')
    ranges = [_range(key, k) for key, k in schedule.items()]
    if ranges[0].first != 1:
        raise BadInput(f"{KEY}: got {next(iter(schedule))!r} as the first range, expected it to begin at batch size 1")
    for before, after in itertools.pairwise(ranges):
        if before.last is None or after.first <= before.last:
            raise BadInput(
                f"{KEY}: got {_name(after)!r} after {_name(before)!r}, expected rising ranges without overlap"
            )
    return tuple(ranges)


def k_for(batch: int, schedule: Mapping[str, int] | tuple[Range, ...]) -> int:
    """Draft length at a batch of `batch` requests. Raises ValueError for a batch below 1."""
    ranges = schedule if isinstance(schedule, tuple) else parse(schedule)
    if batch < 1:
        raise BadInput(f"batch: got {batch} requests, expected 1 or more")
    return next(entry.k for entry in reversed(ranges) if entry.first <= batch)


def read(path: Path) -> dict[str, int]:
    """The schedule in a JSON file: `bench`'s schedule.json, or only the mapping. Raises ValueError with one line."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise BadInput(f"{KEY}: got {path}, expected the schedule.json of a bench, or a mapping: {error}") from None
    schedule = content.get("schedule", content) if isinstance(content, dict) else content
    parse(schedule)
    return schedule


def check_measured(path: Path, wanted: Mapping[str, Any]) -> None:
    """Raise where bench measured the schedule in a file under other values of rollout.*: it says which pays there."""
    content = json.loads(Path(path).read_text())
    for key, value in wanted.items():
        if isinstance(content, dict) and content.get(key, value) != value:
            raise BadInput(
                f"{KEY}: got {path}, measured with rollout.{key}={content[key]}, but this run has {value}; measure it "
                "again with bench, or give the ranges themselves"
            )


def text(schedule: Mapping[str, int]) -> str:
    """The schedule in a few characters: `1-16:3 64-128:2 256+:0`."""
    return " ".join(f"{key}:{k}" for key, k in schedule.items())


def vllm_ranges(schedule: Mapping[str, int], max_num_seqs: int) -> list[list[int]]:
    """The schedule as vLLM's `num_speculative_tokens_per_batch_size`: [first, last, k], both ends included.

    In vLLM, too, a gap takes the k of the range below it. A range without end stops at max_num_seqs.
    """
    return [[r.first, r.last or max(r.first, max_num_seqs), r.k] for r in parse(schedule)]


def from_sizes(best: Mapping[int, int]) -> dict[str, int]:
    """The schedule from the best k at some batch sizes. Each k holds up to the next measured size; equal neighbours are
    merged. Below the smallest size, its k holds."""
    sizes = sorted(best)
    if not sizes:
        raise BadInput("no batch size was measured")
    starts = [(1, best[sizes[0]])]
    for size in sizes[1:]:
        if best[size] != starts[-1][1]:
            starts.append((size, best[size]))
    ends = [first - 1 for first, _ in starts[1:]]
    closed = {
        (f"{first}-{last}" if last > first else str(first)): k for (first, k), last in zip(starts, ends, strict=False)
    }
    return closed | {f"{starts[-1][0]}+": starts[-1][1]}


def _range(key: Any, k: Any) -> Range:
    found = re.fullmatch(r"([1-9]\d*)(?:(\+)|-([1-9]\d*))?", str(key))
    if not found:
        raise BadInput(f'{KEY}: got {key!r}, expected a range of batch sizes: "1-16", "8" or "64+"')
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise BadInput(f"{KEY}: got {k!r} for {key!r}, expected an integer of at least 0")
    first = int(found[1])
    last = None if found[2] else int(found[3] or first)
    if last is not None and last < first:
        raise BadInput(f"{KEY}: got {key!r}, which ends before it begins")
    return Range(first, last, k)


def _name(entry: Range) -> str:
    return f"{entry.first}+" if entry.last is None else f"{entry.first}-{entry.last}"
