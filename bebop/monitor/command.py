"""`./launch.sh monitor watch | replay | import`: the monitor on records that exist, of bebop or of another trainer."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bebop.errors import BadInput
from bebop.monitor.alarms import alarms
from bebop.monitor.decision import decide
from bebop.monitor.decomposition import current, slope_of
from bebop.monitor.imported import Row, read_source, steps_of
from bebop.monitor.summary import length_of, state_of, summarise
from bebop.records import StepRecord
from bebop.store.files import write_json
from bebop.store.metrics import JsonlSink, read_steps
from bebop.store.run_folder import SUMMARY
from bebop.store.tables import format_table, print_table, text

SHOWN = 15  # steps


def watch(run_dir: Path, every_s: float) -> None:
    """Print the last steps, the slope and the decision, again whenever a step has been added, until the run has ended.

    On a terminal the page is drawn over the last one; elsewhere only new steps are printed. Ctrl-C ends it.
    """
    on_terminal, seen = sys.stdout.isatty(), -1
    while True:
        steps = read_steps(run_dir)
        if len(steps) != seen:
            print(("\x1b[H\x1b[2J\x1b[3J" if on_terminal else "") + page(run_dir, steps), flush=True)
        seen = len(steps)
        if (run_dir / SUMMARY).exists():
            return
        time.sleep(every_s)


def page(run_dir: Path, steps: Sequence[StepRecord]) -> str:
    """What `watch` shows."""
    rows = [
        {
            "step": step.step,
            "reward": step.reward_mean,
            "AL": step.acceptance_length,
            "entropy [nats]": step.entropy_nats,
            "staleness": step.staleness_mean,
            "tokens/s": step.tokens_per_s,
            "step [s]": step.step_s,
        }
        for step in steps[-SHOWN:]
    ]
    slope = slope_of(current(steps))
    found = f"{slope.slope:+.3f} [{slope.low:+.3f}, {slope.high:+.3f}] tokens per nat" if slope.fit else slope.reason
    lines = [
        f"{run_dir}: {len(steps)} steps" + (", finished" if (run_dir / SUMMARY).exists() else ""),
        format_table(rows) if rows else "no steps yet",
        f"AL, last 5 steps: {text(length_of(current(steps)[-5:]), 2)}   slope: {found}",
        f"decision: {decide(state_of(run_dir)).reason}",
        *(f"alarm: {alarm}" for alarm in alarms(steps)),
    ]
    return "\n".join(lines)


def replay(run_dir: Path) -> None:
    """Print the decision that the monitor takes after each step of a run; consecutive equal ones are one row."""
    state = state_of(run_dir)
    if not state.history:
        raise BadInput(f"{run_dir}: no RL steps in metrics.jsonl; give the folder of a grpo or demo run, or an import")
    rows: list[dict[str, Any]] = []
    for number, step in enumerate(state.history, start=1):
        decision = decide(replace(state, history=state.history[:number]))
        if rows and rows[-1]["decision"] == decision.word:
            rows[-1] |= {"to step": step.step, "reason at the last": decision.reason}
        else:
            at = {"from step": step.step, "to step": step.step}
            rows.append(at | {"decision": decision.word, "reason at the last": decision.reason})
    print_table(rows)


def bring_in(sources: Sequence[Path], run_dir: Path, **settings: Any) -> None:
    """Write the steps of `sources` to run_dir/metrics.jsonl; rows of several sources are joined by their step.

    settings: those of `steps_of`. Prints what was read, and the summary.
    """
    rows: dict[int, Row] = {}
    for source in sources:
        kind, found = read_source(source)
        print(f"{source}: {kind}, {len(found)} steps", flush=True)
        for step, row in found.items():
            rows.setdefault(step, {}).update({name: value for name, value in row.items() if value is not None})
    records = steps_of(rows, **settings)
    complete = [r for r in records if r.entropy_nats is not None and r.acceptance_length is not None]
    print(f"{len(complete)} of {len(records)} steps have both entropy and acceptance length", flush=True)
    with JsonlSink(run_dir) as sink:
        for record in records:
            sink.write(record)
    summary = summarise(run_dir)
    write_json(run_dir / SUMMARY, summary)
    shown = ("acceptance_length", "slope", "slope_low", "slope_high", "decision", "decision_reason")
    print_table([{"": name, "value": text(summary[name])} for name in shown])


def run(config: Any, run_dir: Path) -> None:
    """config: the command's (bebop.config). run_dir: the folder to watch, to replay, or to import to."""
    if config.action == "watch":
        watch(run_dir, config.every_s)
    elif config.action == "replay":
        replay(run_dir)
    else:
        settings = {
            name: getattr(config, name) for name in ("num_speculative_tokens", "acceptance_rule", "temperature")
        }
        bring_in([Path(config.source), *([Path(config.counters)] if config.counters else [])], run_dir, **settings)
