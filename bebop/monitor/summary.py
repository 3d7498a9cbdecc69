"""The result of a run as one flat mapping, from its records only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bebop.monitor.alarms import alarms, checksums_equal, largest_probs_diff
from bebop.monitor.decision import Decision, MonitorState, decide
from bebop.monitor.decomposition import Drafted, current, slope_of
from bebop.records import DraftCounts
from bebop.store.files import read_json
from bebop.store.metrics import read_records, read_steps

WINDOW = 5  # steps that "first" and "last" average


def state_of(run_dir: Path | str) -> MonitorState:
    """The monitor's state from a run folder: its steps, and the monitor's settings in run.json if it has them.

    The entropy range of the pre-RL data is the config's; else that of the last record with kind "monitor"; else the one
    recorded with heads that were trained in this folder (checkpoint/bebop.json).
    """
    run_dir = Path(run_dir)
    settings = read_json(run_dir / "run.json").get("config", {}).get("monitor") or {}
    known = {
        key: settings[key] for key in ("early_steps", "min_steps", "min_mismatch") if settings.get(key) is not None
    }
    ranges = [record.get("entropy_range") for record in read_records(run_dir, "monitor")]
    ranges = [
        settings.get("entropy_range"),
        *reversed(ranges),
        read_json(run_dir / "checkpoint" / "bebop.json").get("entropy_range"),
    ]
    found = next((tuple(span) for span in ranges if span), None)
    return MonitorState(read_steps(run_dir), entropy_range=found, **known)


def summarise(run_dir: Path | str) -> dict[str, Any]:
    """Numbers of a finished or running run, each with the steps that it covers; None if there is no data.

    reward_first, reward_last: mean over the first and last 5 steps.
    acceptance_length: from the pooled counts of the last 5 steps that drafted (acceptance_length_steps);
        acceptance_length_run: from all steps under the current draft length, rule and temperature.
    slope: acceptance length per nat over those steps, with its 95 % interval.
    heads_checksums_equal, probs_diff_max, alarms: whether the engine served the trainer's heads and probabilities.
    decision: in words, with decision_update true, false or null.
    """
    state = state_of(run_dir)
    steps = state.history
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    drafted = current(steps)
    last = drafted[-WINDOW:]
    counts = pooled(last)
    definition = last[-1].definition if last else None
    slope, decision = slope_of(drafted), decide(state)
    return {
        "steps": len(steps),
        "reward_first": _mean(rewards[:WINDOW]),
        "reward_last": _mean(rewards[-WINDOW:]),
        "reward_window": min(WINDOW, len(rewards)),
        "acceptance_length": length_of(last),
        "acceptance_length_steps": [last[0].step, last[-1].step] if last else None,
        "acceptance_length_run": length_of(drafted),
        "acceptance_rule": definition.acceptance_rule if definition else None,
        "temperature": definition.temperature if definition else None,
        "num_speculative_tokens": definition.num_speculative_tokens if definition else None,
        "conditional_acceptance": list(counts.conditional_acceptance) if last else None,
        "counts": asdict(counts),
        "counts_run": asdict(pooled(drafted)),
        "slope": slope.slope,
        "slope_low": slope.low,
        "slope_high": slope.high,
        "slope_relative": slope.relative,
        "slope_status": slope.status,
        "slope_reason": slope.reason or None,
        "slope_steps": slope.n,
        "heads_checksums_equal": checksums_equal(steps),
        "probs_diff_max": largest_probs_diff(steps),
        "alarms": alarms(steps),
        **decision_fields(decision),
    }


def decision_fields(decision: Decision) -> dict[str, Any]:
    """A decision as entries of a summary."""
    return {
        "decision": decision.word,
        "decision_update": decision.update,
        "decision_reason": decision.reason,
        "decision_evidence": dict(decision.evidence),
    }


def pooled(steps: Sequence[Drafted]) -> DraftCounts:
    """Sum of the steps' counts; zeros without steps, then the acceptance length is None."""
    return sum((step.counts for step in steps), DraftCounts())


def length_of(steps: Sequence[Drafted]) -> float | None:
    """Acceptance length from the pooled counts; of imported steps without counts, the mean over steps."""
    pooled_length = pooled(steps).acceptance_length
    return _mean([step.acceptance_length for step in steps]) if pooled_length is None else pooled_length


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
