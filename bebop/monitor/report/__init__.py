"""The report of a run: one self-contained report.html and PNGs in plots/, from the run folder's JSON files alone.

It works on a run that is still going, and on one that only trained heads; what a run has no records of is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop.errors import BadInput
from bebop.monitor.decision import MonitorState
from bebop.monitor.decomposition import decompose, slope_of, split_by_definition
from bebop.monitor.report import page
from bebop.monitor.summary import WINDOW, pooled, state_of, summarise
from bebop.store.definitions import definitions_table, meaning_of
from bebop.store.files import plain, read_json, write_text
from bebop.store.metrics import read_records
from bebop.store.tables import text

REPORT = "report.html"
PLOTS = "plots"
BAND = "Bands are 95 % intervals."


def write_report(run_dir: Path | str) -> Path:
    """Write run_dir/report.html and run_dir/plots/*.png; returns the page's path.

    Raises ValueError where the folder has no records.
    """
    run_dir = Path(run_dir)
    records = read_records(run_dir)
    if not records:
        raise BadInput(f"{run_dir}: no records in metrics.jsonl; give the folder of a run")
    state, made_by = state_of(run_dir), read_json(run_dir / "run.json")
    title = f"{made_by.get('command', 'run')}: {run_dir.resolve().name}"
    body = [page.heading(f"bebop {title}", 1), page.paragraph(_provenance(made_by, run_dir, state), "muted")]
    if state.history:
        body += _rl_part(run_dir, state)
    body += _heads_part(run_dir, records)
    body += [_eval_part(records), _time_part(records), *_appendix(made_by)]
    path = run_dir / REPORT
    return write_text(path, page.page(f"bebop {title}", body))


def _provenance(made_by: dict[str, Any], run_dir: Path, state: MonitorState) -> str:
    facts = [f"started {made_by['started_at']}"] if "started_at" in made_by else []
    if made_by.get("resumed"):
        facts.append(f"resumed {len(made_by['resumed'])} times")
    if made_by.get("git_revision"):
        facts.append(f"revision {made_by['git_revision'][:12]}")
    if state.history:
        facts.append(f"{len(state.history)} RL steps")
    facts.append(
        "finished" if (run_dir / "summary.json").exists() else "not finished, or no summary.json: as far as recorded"
    )
    return ", ".join(facts)


def _rl_part(run_dir: Path, state: MonitorState) -> list[str]:
    summary, steps = summarise(run_dir), state.history
    parts = decompose(steps, early_steps=state.early_steps)
    body = [
        _cards(summary),
        page.decision_box(summary["decision"], summary["decision_reason"], summary["decision_update"]),
    ]
    body += [page.alarm_box(alarm) for alarm in summary["alarms"]]
    evidence = dict(summary["decision_evidence"])
    evidence |= evidence.pop("counts", {})
    body.append(page.details("The decision's evidence", page.key_values(plain(evidence))))
    how = _how(summary)
    figures = [
        (
            "Acceptance length and entropy",
            "acceptance_over_entropy",
            (steps, state.entropy_range),
            f"One point per RL step. Acceptance length: {meaning_of('acceptance_length')} {how} Entropy: "
            f"{meaning_of('entropy_nats')} Line: least squares over the steps of one draft length, rule and "
            f"temperature; its interval is Newey-West, since RL steps are autocorrelated. {BAND}",
        ),
        (
            "Over RL steps",
            "over_steps",
            (steps, state.entropy_range),
            f"Faint: each step; bold: running mean of 5 steps. {how} Reward: {meaning_of('reward_mean')}",
        ),
        (
            "Acceptance per depth",
            "conditional_acceptance",
            (steps,),
            "Accepted at depth j over accepted at depth j - 1 (depth 1: over drafts), pooled over the step's requests. "
            f"{how} {BAND} They are binomial, from the counts.",
        ),
        (
            "Entropy or mismatch",
            "decomposition",
            (parts,),
            "Change of the acceptance length against the early line at the first step's entropy. By entropy: early "
            "slope times the change of entropy. Mismatch: the rest, a regression residual; below 0 where the heads fit "
            f"the policy worse than its entropy explains. {BAND} They carry the slope's own uncertainty.",
        ),
    ]
    for words, name, arguments, caption in figures:
        body += _figure(run_dir, words, name, arguments, caption)
    if parts.recent is None and any(step.acceptance_length is not None for step in steps):
        body.append(page.paragraph(f"No decomposition: early phase: {parts.early.reason}."))
    return [*body, *_counts_part(steps)]


def _how(summary: dict[str, Any]) -> str:
    if summary["acceptance_rule"] is None:
        return "Nothing was drafted."
    return (
        f"Rule: {summary['acceptance_rule']}; temperature {summary['temperature']:g}; draft length "
        f"{summary['num_speculative_tokens']}."
    )


def _cards(summary: dict[str, Any]) -> str:
    slope = "undetermined"
    about_slope = summary["slope_reason"]
    if summary["slope"] is not None:
        slope = f"{summary['slope']:+.2f} [{summary['slope_low']:+.2f}, {summary['slope_high']:+.2f}]"
        about_slope = f"Relative to the mean acceptance length: {text(summary['slope_relative'], 2)} per nat."
    steps = summary["acceptance_length_steps"]
    over = f"Tokens per target forward, pooled over steps {steps[0]} to {steps[1]}. " if steps else ""
    reward = f"Mean over the first and the last {summary['reward_window']} steps; {meaning_of('reward_mean').lower()}"
    how_slope = f"Acceptance length over target entropy, {summary['slope_steps']} steps, 95 % Newey-West. {about_slope}"
    return page.cards(
        [
            ("Mean reward", f"{text(summary['reward_first'])} → {text(summary['reward_last'])}", reward),
            ("Acceptance length", text(summary["acceptance_length"], 2), over + _how(summary)),
            ("Slope per nat", slope, how_slope),
        ]
    )


def _counts_part(steps: Sequence[Any]) -> list[str]:
    slopes, counts = [], []
    for definition, group in split_by_definition(steps).items():
        slope = slope_of(group)
        slopes.append(
            [str(definition), slope.n, slope.slope, slope.low, slope.high, slope.relative, slope.reason or slope.status]
        )
        for name, some in ((f"last {len(group[-WINDOW:])} steps", group[-WINDOW:]), (f"all {len(group)} steps", group)):
            c = pooled(some)
            for j, accepted in enumerate(c.accepted_per_depth):
                counts.append(
                    [
                        str(definition),
                        name,
                        j + 1,
                        c.num_drafts,
                        accepted,
                        accepted / c.num_drafts,
                        c.conditional_acceptance[j],
                    ]
                )
    if not slopes:
        return [page.paragraph("No drafts were observed: no acceptance to show.")]
    header = ["acceptance under", "steps", "slope per nat", "low", "high", "relative", "status"]
    count_header = ["acceptance under", "over", "depth", "drafts", "accepted", "share of drafts", "conditional"]
    return [
        page.heading("Slopes and raw counts"),
        page.table(header, slopes),
        page.table(count_header, counts),
        page.paragraph(
            "Slopes are not pooled over draft lengths, rules or temperatures. Drafts and accepted are raw counts.",
            "muted",
        ),
    ]


def _heads_part(run_dir: Path, records: Sequence[dict[str, Any]]) -> list[str]:
    train = [record for record in records if record["kind"] == "sft"]
    evals = [record for record in records if record["kind"] == "sft_eval"]
    if not train and not evals:
        return []
    losses = list(dict.fromkeys(str(record["loss_name"]) for record in train if "loss_name" in record))
    temperatures = sorted({record["temperature"] for record in [*train, *evals] if "temperature" in record})
    caption = (
        (f"Loss: {', then '.join(losses)}. " if losses else "")
        + "Overlap at depth j: mean of sum min(p, q) over anchors, each depth for itself, "
        + ("on held-out text. " if evals else "on the training batch. ")
        + "Scored acceptance length: expected tokens per target forward under rejection sampling, heads re-run "
        + "on held-out text that the policy sampled; bars are 95 % intervals. "
        + (f"Temperature {', '.join(f'{t:g}' for t in temperatures)}." if temperatures else "")
    )
    body = _figure(run_dir, "Training of the heads", "sft_curves", (train, evals), caption)
    scored = [record for record in evals if isinstance(record.get("acceptance_length"), (int, float))]
    rows = [
        [r["step"], r["acceptance_length"], r.get("acceptance_length_se"), *r.get("alpha", ()), r.get("num_anchors")]
        for r in (scored[:1] + scored[-1:] if len(scored) > 1 else scored)
    ]
    depth = max((len(row) for row in rows), default=4) - 4
    header = [
        "optimizer step",
        "scored acceptance length",
        "standard error",
        *(f"overlap {j + 1}" for j in range(depth)),
        "anchors",
    ]
    return [*body, page.table(header, rows) if all(len(row) == len(header) for row in rows) else ""]


def _eval_part(records: Sequence[dict[str, Any]]) -> str:
    rows = [row for record in records if record["kind"] == "eval" for row in record.get("rows", [])]
    if not rows:
        return ""
    header = list(rows[0])
    return page.heading("Evaluation") + page.table(header, [[row.get(key) for key in header] for row in rows])


def _time_part(records: Sequence[dict[str, Any]]) -> str:
    seconds: dict[str, float] = {}
    for record in records:
        if record["kind"] == "stage":
            seconds[record["name"]] = seconds.get(record["name"], 0.0) + record["seconds"]
    if not seconds:
        return ""
    rows = [[name, round(value, 1)] for name, value in seconds.items()]
    return page.heading("Time") + page.table(
        ["stage", "wall seconds"], [*rows, ["all", round(sum(seconds.values()), 1)]]
    )


def _appendix(made_by: dict[str, Any]) -> list[str]:
    config = made_by.get("config")
    return [
        page.heading("Definitions and provenance"),
        page.details("What every logged number means", page.table(["key", "label", "definition"], definitions_table())),
        page.details("Configuration", page.preformatted(json.dumps(plain(config), indent=2)) if config else ""),
        page.details("Package versions", page.key_values(made_by.get("packages", {}))),
    ]


def _figure(run_dir: Path, words: str, name: str, arguments: tuple[Any, ...], caption: str) -> list[str]:
    """Draw plots.<name>, save it and embed it; nothing where it has no data."""
    from bebop.monitor.report import plots

    png = run_dir / PLOTS / f"{name}.png"
    drawn = getattr(plots, name)(*arguments)
    if drawn is None:
        png.unlink(missing_ok=True)
        return []
    png.parent.mkdir(exist_ok=True)
    plots.save(drawn, str(png))
    return [page.heading(words), page.figure(png, caption)]
