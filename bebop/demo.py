"""The demo: every stage in its order, on this machine, with the real parts.

A tiny policy is trained. Its MTP heads are trained on its own samples with the end-to-end TV loss. Async GRPO drafts
with them and verifies by rejection sampling. The monitor computes slope and decision from the records. Each stage runs
the code of its own command; the demo adds the order, the times and the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bebop.config import DemoConfig, GrpoConfig, SftConfig
from bebop.monitor import JsonlSink, print_table, read_records, summarise, write_report, write_summary


def run(config: DemoConfig, run_dir: Path) -> int:
    """Run or resume the demo in `run_dir`; writes summary.json and report.html there. Returns the exit code 0."""
    from bebop import rl, sft
    from bebop.policies import prepare_policy

    with _clock(run_dir, "policy"):
        prepare_policy(config.model, config.seed, max_model_len=config.rollout.max_model_len)
    with _clock(run_dir, "heads"):
        heads = sft.run(_part(SftConfig, config), run_dir)
    with _clock(run_dir, "grpo"):
        rl.run(_part(GrpoConfig, config), run_dir, policy_dir=heads.checkpoint)
    seconds = _seconds(run_dir)
    summary = {
        **summarise(run_dir),
        "heads_acceptance_length_scored": heads.summary.get("acceptance_length"),
        "seconds": seconds,
        "elapsed_s": round(sum(seconds.values()), 1),
    }
    write_summary(run_dir, summary)
    write_report(run_dir)
    print_table(_rows(summary))
    return 0


def _part(model: type[BaseModel], config: DemoConfig) -> Any:
    """The config of a stage, as its own command would have it."""
    return model.model_validate({name: getattr(config, name) for name in model.model_fields})


@contextmanager
def _clock(run_dir: Path, stage: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        # Also for a stage that was stopped, so that a resumed demo adds to the same sum.
        with JsonlSink(run_dir) as sink:
            sink.write({"kind": "stage", "name": stage, "seconds": round(time.monotonic() - start, 2)})


def _seconds(run_dir: Path) -> dict[str, float]:
    total: dict[str, float] = {}
    for record in read_records(run_dir):
        if record["kind"] == "stage":
            total[record["name"]] = round(total.get(record["name"], 0.0) + record["seconds"], 1)
    return total


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    def number(key: str, digits: int = 3) -> str:
        value = summary.get(key)
        return "undetermined" if value is None else f"{value:.{digits}f}"

    seconds = ", ".join(f"{name} {value:.0f}" for name, value in summary["seconds"].items())
    return [
        ("mean reward, first 5 steps", number("reward_first")),
        ("mean reward, last 5 steps", number("reward_last")),
        ("acceptance length, rejection, pooled", number("acceptance_length", 2)),
        (
            "slope, tokens per nat (95 %)",
            f"{number('slope', 2)}  [{number('slope_low', 2)}, {number('slope_high', 2)}]",
        ),
        ("update the heads online?", str(summary.get("decision"))),
        ("because", str(summary.get("decision_reason"))),
        ("seconds", f"{summary['elapsed_s']:.0f} ({seconds})"),
    ]
