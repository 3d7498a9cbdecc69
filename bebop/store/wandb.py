"""Weights & Biases as one more sink; the only place that imports wandb.

Offline mode needs neither network nor key and never prompts; `close` prints the command that uploads the run. Besides
curves over steps there is a chart of acceptance length against entropy, and a table with the definition of every key.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bebop.errors import LoggerError
from bebop.records import StepRecord
from bebop.store.definitions import PREFIX, definitions_table, flatten
from bebop.store.files import cache_home, plain, read_json, write_text
from bebop.store.metrics import read_records, step_from_json

MODES = ("offline", "online", "disabled")
BY_ENTROPY = f"{PREFIX}by_entropy/acceptance_length"  # acceptance length with entropy as its x axis


def check_wandb(mode: str) -> None:
    """Raise LoggerError if `mode` can't work here. Call it before anything is loaded; it does not use the network."""
    if mode not in MODES:
        raise LoggerError(f"logger.wandb={mode}: expected one of {', '.join(MODES)}")
    if mode == "disabled":
        return
    try:
        import wandb
    except ImportError:
        raise LoggerError(f"logger.wandb={mode}: wandb is not installed; set logger.wandb=disabled") from None
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise LoggerError(
            "logger.wandb=online: no API key (WANDB_API_KEY or `wandb login`); set one, or logger.wandb=offline"
        )


class WandbSink:
    """Writes records to a W&B run; with mode "disabled" it does nothing.

    An offline run that is resumed becomes a new W&B run that starts with the records in run_dir/metrics.jsonl, so that
    the last folder holds all of them. Online, the run continues under its id.
    """

    def __init__(self, mode: str, project: str, name: str | None, run_dir: Path | str) -> None:
        """name: of the run; None: the folder's name. The config in run_dir/run.json is logged. Raises LoggerError."""
        check_wandb(mode)
        self.mode, self.run_dir, self.sync_dir = mode, Path(run_dir).resolve(), None
        self._steps: dict[int, StepRecord] = {}
        self._run: Any = None
        if mode == "disabled":
            return
        import wandb

        if not os.environ.keys() & {"HOME", "XDG_CACHE_HOME"}:  # without a cache, wandb's service logs to the console
            os.environ.setdefault("WANDB_CACHE_DIR", str(cache_home() / "wandb"))
        self.run_dir.mkdir(parents=True, exist_ok=True)
        made_by = read_json(self.run_dir / "run.json")
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True)
        how: Any = {"mode": mode}
        if mode == "online":
            how |= {"id": _run_id(self.run_dir), "resume": "allow"}
        self._run = wandb.init(
            project=project,
            name=name or self.run_dir.name,
            dir=str(self.run_dir),
            config=plain(made_by.get("config", {}))
            | {"made_by": plain({k: v for k, v in made_by.items() if k != "config"})},
            settings=quiet,
            **how,
        )
        self.sync_dir = Path(self._run.settings.sync_dir)
        self._define_axes()
        earlier = read_records(self.run_dir)
        for record in earlier:
            if record["kind"] == "step":
                step = step_from_json(record)
                self._steps[step.step] = step
            if mode == "offline":
                self._log(step if record["kind"] == "step" else record)

    def write(self, record: StepRecord | Mapping[str, Any]) -> None:
        """Log one record: a StepRecord, or the numbers of a mapping with its `kind`."""
        if self._run is None:
            return
        if isinstance(record, StepRecord):
            self._steps[record.step] = record
        self._log(record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Put the run's result into W&B's summary, as bebop/<key>."""
        if self._run is not None:
            self._run.summary.update({PREFIX + key: value for key, value in plain(summary).items()})

    def close(self) -> None:
        """Log the charts, end the run, and print how to upload it; calling it again does nothing."""
        if self._run is None:
            return
        import wandb

        rows = [list(row) for row in definitions_table()]
        self._run.log({f"{PREFIX}definitions": wandb.Table(columns=["key", "label", "definition"], data=rows)})
        observed = [s for _, s in sorted(self._steps.items()) if None not in (s.entropy_nats, s.acceptance_length)]
        if observed:
            self._run.log(_charts(observed))
        self._run.finish()
        self._run = None
        if self.mode == "offline":
            print(f"wandb: offline; to upload: wandb sync {shlex.quote(str(self.sync_dir))}", file=sys.stderr)

    def __enter__(self) -> WandbSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(self, record: StepRecord | Mapping[str, Any]) -> None:
        values = flatten(record)
        if isinstance(record, StepRecord) and record.acceptance_length is not None:
            values[BY_ENTROPY] = record.acceptance_length
        if values:
            self._run.log(values)

    def _define_axes(self) -> None:
        """The x axes: each stage's own steps; entropy for `by_entropy`."""
        for axis in (f"{PREFIX}step", f"{PREFIX}sft/step", f"{PREFIX}sft_eval/step"):
            self._run.define_metric(axis, hidden=True)
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        for kind in ("sft", "sft_eval"):
            self._run.define_metric(f"{PREFIX}{kind}/*", step_metric=f"{PREFIX}{kind}/step")
        self._run.define_metric(BY_ENTROPY, step_metric=f"{PREFIX}entropy_nats")


def _charts(steps: list[StepRecord]) -> dict[str, Any]:
    """The curated panels: the scatter that the slope is fitted to, and conditional acceptance per depth over steps."""
    import wandb

    columns: Any = ["entropy [nats]", "acceptance length", "step", "k", "rule", "temperature"]
    data = [
        [s.entropy_nats, s.acceptance_length, s.step, s.num_speculative_tokens, s.acceptance_rule, s.temperature]
        for s in steps
    ]
    scatter = wandb.plot.scatter(
        wandb.Table(columns=columns, data=data), columns[0], columns[1], title="Acceptance length over target entropy"
    )
    shares = [s.counts.conditional_acceptance if s.counts else () for s in steps]
    per_depth = [[_at(share, j) for share in shares] for j in range(max(map(len, shares)))]
    lines = wandb.plot.line_series(
        xs=[s.step for s in steps],
        ys=per_depth,
        keys=[f"depth {j + 1}" for j in range(len(per_depth))],
        title="Conditional acceptance per depth",
        xname="step",
    )
    return {f"{PREFIX}acceptance_over_entropy": scatter, f"{PREFIX}acceptance_per_depth": lines}


def _at(values: tuple[float | None, ...], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _run_id(run_dir: Path) -> str:
    """The W&B id of an online run, the same after a resume."""
    path = run_dir / "wandb_run_id"
    if not path.exists():
        write_text(path, os.urandom(6).hex())
    return path.read_text().strip()


_HEADER, _BLOCK = 7, 32768  # bytes
_LAST_PIECE = (1, 4)  # a whole record, and the end of one in pieces


def offline_history(path: Path) -> Iterator[dict[str, Any]]:
    """What an offline run logged, in order: the values of each call of `log`, with their "_step".

    path: the run's .wandb file.
    """
    from wandb.proto import wandb_internal_pb2

    for data in _leveldb_records(path.read_bytes()[_HEADER:], _HEADER):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            step = {"_step": record.history.step.num}
            yield step | {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }


def _leveldb_records(data: bytes, offset: int) -> Iterator[bytes]:
    """Records of LevelDB's log format, which wandb writes: pieces with a header of 7 bytes, in blocks of 32 KiB.

    offset: of data in its file. A torn last record is left out.
    """
    at, record = 0, b""
    while at + 7 <= len(data):
        left = _BLOCK - (at + offset) % _BLOCK
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if left < 7 or kind == 0:
            at += left
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in _LAST_PIECE and at <= len(data):
            yield record
            record = b""
