"""metrics.jsonl: one JSON object per line, with its `kind` ("step", "sft", "sft_eval", ...) and, for curves, `step`.

Lines are only appended, each with one write, so a killed run leaves at most its last line torn. A resumed run repeats
steps: of two lines of one kind and step, the later one counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bebop.errors import BadInput
from bebop.records import DraftCounts, StepRecord
from bebop.store.files import plain, revive, write_text

METRICS = "metrics.jsonl"


class JsonlSink:
    """Appends records to run_dir/metrics.jsonl; every line is with the operating system once `write` returns."""

    def __init__(self, run_dir: Path | str) -> None:
        self.path = Path(run_dir) / METRICS
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (close() closes it)
        self._mend_torn_line()

    def write(self, record: StepRecord | Mapping[str, Any]) -> None:
        """Append one record: a StepRecord, or a mapping that names its `kind`. Raises BadInput without a kind."""
        line = step_to_json(record) if isinstance(record, StepRecord) else plain(record)
        if not isinstance(line.get("kind"), str):
            raise BadInput(f"record: got kind={line.get('kind')!r}, expected a string such as 'sft'")
        line = {**line, "time": line.get("time", round(time.time(), 3))}
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Flush to the disk and close; calling it again does nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mend_torn_line(self) -> None:
        """Drop a last line that a crash tore; add the newline to one that only lacks it."""
        self._file.seek(0)
        content = self._file.read()
        tail = content[content.rfind(b"\n") + 1 :]
        if not tail:
            return
        if _parse(tail) is None:
            self._file.truncate(len(content) - len(tail))
        else:
            self._file.write(b"\n")


def read_records(run_dir: Path | str, kind: str | None = None) -> list[dict[str, Any]]:
    """Records of run_dir/metrics.jsonl, of one kind if given; [] if there is no file yet.

    Of several lines with one kind and step the last is kept, in order of steps within a kind. A torn last line is left
    out; a bad line before it raises BadInput with its number.
    """
    path = Path(run_dir) / METRICS
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records: dict[tuple[str, Any], dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is None:
            if number == len(lines):
                break
            raise BadInput(f"{path}:{number}: got {line[:60]!r}, expected a JSON object with a kind")
        if kind is not None and record["kind"] != kind:
            continue
        step = record.get("step")
        key = (record["kind"], ("line", number) if step is None else step)
        records.pop(key, None)
        records[key] = record
    return sorted(records.values(), key=lambda record: math.inf if record.get("step") is None else record["step"])


def read_steps(run_dir: Path | str) -> list[StepRecord]:
    """The RL steps of a run, in order; [] if there are none."""
    return [step_from_json(record) for record in read_records(run_dir, "step")]


def drop_steps_after(path: Path, step: int, kind: str | None = None) -> None:
    """Delete the lines of steps later than `step`, those of one kind if given: a resumed run takes these steps again.

    path: metrics.jsonl or another file of JSON lines with a `step`. Torn lines are dropped too.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if (kind is None or record.get("kind") == kind) and record.get("step", 0) > step:
            continue
        kept.append(line + "\n")
    write_text(path, "".join(kept))


def step_to_json(record: StepRecord) -> dict[str, Any]:
    """A StepRecord as JSON values, kind "step", with the acceptance length next to the counts it is made of."""
    fields = dataclasses.asdict(record)
    fields["extra"] = dict(record.extra)
    values: dict[str, Any] = plain({"kind": "step", **fields, "acceptance_length": record.acceptance_length})
    return values


def step_from_json(values: Mapping[str, Any]) -> StepRecord:
    """The StepRecord of a line; unknown keys are ignored. Raises BadInput on a missing one."""
    names = {field.name for field in dataclasses.fields(StepRecord)}
    known = {name: value for name, value in revive(values).items() if name in names}
    counts = known.get("counts")
    if counts is not None:
        known["counts"] = DraftCounts(**{**counts, "accepted_per_depth": tuple(counts["accepted_per_depth"])})
    try:
        return StepRecord(**known)
    except TypeError as error:
        raise BadInput(f"step record: {error}; it has {', '.join(sorted(known))}") from None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return revive(record) if isinstance(record, dict) and isinstance(record.get("kind"), str) else None
