"""The report of a run: one self-contained report.html and PNGs in plots/, from the run folder's JSON files only.

It works on a run that is not finished, and on one that only trained heads; parts without records are left out. The page
is report.html.jinja; this module gathers what it shows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bebop.errors import BadInput
from bebop.monitor.decision import MonitorState
from bebop.monitor.decomposition import decompose, slope_of, split_by_definition
from bebop.monitor.summary import WINDOW, pooled, state_of, summarise
from bebop.records import StepRecord
from bebop.store.definitions import definitions_table, meaning_of
from bebop.store.files import plain, read_json, write_text
from bebop.store.metrics import read_records
from bebop.store.run_folder import RUN, SUMMARY
from bebop.store.tables import Rows, format_table, text

REPORT = "report.html"
PLOTS = "plots"
BAND = "Bands are 95 % intervals."
Record = Mapping[str, Any]


def write_report(run_dir: Path | str) -> Path:
    """Write run_dir/report.html and run_dir/plots/*.png; returns the page's path.

    Raises BadInput if the folder has no records.
    """
    run_dir = Path(run_dir)
    records = read_records(run_dir)
    if not records:
        raise BadInput(f"{run_dir}: no records in metrics.jsonl; give the folder of a run")
    state, made_by = state_of(run_dir), read_json(run_dir / RUN)
    config = made_by.get("config")
    page = _template().render(
        title=f"{made_by.get('command', 'run')}: {run_dir.resolve().name}",
        provenance=_provenance(made_by, run_dir, state),
        rl=_rl(run_dir, state) if state.history else None,
        heads=_heads_figure(run_dir, records),
        scores=_scores(records),
        evaluation=[row for record in records if record["kind"] == "eval" for row in record.get("rows", [])],
        seconds=_seconds(records),
        definitions=[dict(zip(("key", "label", "definition"), row, strict=True)) for row in definitions_table()],
        config=json.dumps(plain(config), indent=2) if config else None,
        packages=list(made_by.get("packages", {}).items()),
    )
    return write_text(run_dir / REPORT, page)


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"table": _html_table, "sentence": lambda words: words[:1].upper() + words[1:]}
    return environment.get_template("report.html.jinja")


def _html_table(rows: Rows) -> Markup:
    return Markup(format_table(rows, style="html"))  # escaped by tabulate


def _provenance(made_by: Record, run_dir: Path, state: MonitorState) -> list[str]:
    facts = [f"started {made_by['started_at']}"] if "started_at" in made_by else []
    if made_by.get("resumed"):
        facts.append(f"resumed {len(made_by['resumed'])} times")
    if made_by.get("git_revision"):
        facts.append(f"revision {made_by['git_revision'][:12]}")
    if state.history:
        facts.append(f"{len(state.history)} RL steps")
    finished = (run_dir / SUMMARY).exists()
    return [*facts, "finished" if finished else "not finished, or no summary.json: as far as recorded"]


def _rl(run_dir: Path, state: MonitorState) -> dict[str, Any]:
    """What the page shows of the RL steps."""
    summary, steps = summarise(run_dir), state.history
    parts = decompose(steps, early_steps=state.early_steps)
    evidence = dict(summary["decision_evidence"])
    evidence |= evidence.pop("counts", {})
    how = _how(summary)
    figures = [
        (
            "Acceptance length and entropy",
            "acceptance_over_entropy",
            (steps, state.entropy_range),
            f"One point per RL step. Acceptance length: {meaning_of('acceptance_length')} {how} Entropy: "
            f"{meaning_of('entropy_nats')} Line: least squares over the steps of one draft length, rule and "
            f"temperature; its interval allows for the correlation of RL steps with each other. {BAND}",
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
            "slope times the change of entropy. Mismatch: the rest, a regression residual; below 0 if the heads fit "
            f"the policy worse than its entropy explains. {BAND} They include the slope's own uncertainty.",
        ),
    ]
    drafted = any(step.acceptance_length is not None for step in steps)
    slopes, counts = _slopes_and_counts(steps)
    return {
        **summary,
        "css": {True: "yes", False: "no", None: ""}[summary["decision_update"]],
        "cards": _cards(summary),
        "evidence": [[key, text(value) if isinstance(value, float) else str(value)] for key, value in evidence.items()],
        "figures": [_figure(run_dir, *figure) for figure in figures],
        "no_decomposition": parts.early.reason if parts.recent is None and drafted else None,
        "slopes": slopes,
        "counts": counts,
    }


def _how(summary: Record) -> str:
    if summary["acceptance_rule"] is None:
        return "Nothing was drafted."
    return (
        f"Rule: {summary['acceptance_rule']}; temperature {summary['temperature']:g}; draft length "
        f"{summary['num_speculative_tokens']}."
    )


def _cards(summary: Record) -> list[tuple[str, str, str]]:
    """(name, value, definition) of the numbers to read first."""
    slope = "undetermined"
    about_slope = summary["slope_reason"]
    if summary["slope"] is not None:
        slope = f"{summary['slope']:+.2f} [{summary['slope_low']:+.2f}, {summary['slope_high']:+.2f}]"
        about_slope = f"Relative to the mean acceptance length: {text(summary['slope_relative'], 2)} per nat."
    steps = summary["acceptance_length_steps"]
    over = f"Tokens per target forward, pooled over steps {steps[0]} to {steps[1]}. " if steps else ""
    reward = f"Mean over the first and the last {summary['reward_window']} steps; {meaning_of('reward_mean').lower()}"
    how_slope = f"Acceptance length over target entropy, {summary['slope_steps']} steps, 95 % interval. {about_slope}"
    return [
        ("Mean reward", f"{text(summary['reward_first'])} → {text(summary['reward_last'])}", reward),
        ("Acceptance length", text(summary["acceptance_length"], 2), over + _how(summary)),
        ("Slope per nat", slope, how_slope),
    ]


def _slopes_and_counts(steps: Sequence[StepRecord]) -> tuple[list[Record], list[Record]]:
    slopes: list[Record] = []
    counts: list[Record] = []
    for definition, group in split_by_definition(steps).items():
        slope = slope_of(group)
        slopes.append(
            {
                "acceptance under": str(definition),
                "steps": slope.n,
                "slope per nat": slope.slope,
                "low": slope.low,
                "high": slope.high,
                "relative": slope.relative,
                "status": slope.reason or slope.status,
            }
        )
        for name, some in ((f"last {len(group[-WINDOW:])} steps", group[-WINDOW:]), (f"all {len(group)} steps", group)):
            c = pooled(some)
            counts += [
                {
                    "acceptance under": str(definition),
                    "over": name,
                    "depth": j + 1,
                    "drafts": c.num_drafts,
                    "accepted": accepted,
                    "share of drafts": accepted / c.num_drafts,
                    "conditional": c.conditional_acceptance[j],
                }
                for j, accepted in enumerate(c.accepted_per_depth)
            ]
    return slopes, counts


def _heads_figure(run_dir: Path, records: Sequence[Record]) -> dict[str, str] | None:
    train = [record for record in records if record["kind"] == "sft"]
    evals = [record for record in records if record["kind"] == "sft_eval"]
    if not train and not evals:
        return None
    losses = list(dict.fromkeys(str(record["loss_name"]) for record in train if "loss_name" in record))
    temperatures = sorted({record["temperature"] for record in [*train, *evals] if "temperature" in record})
    caption = (
        (f"Loss: {', then '.join(losses)}. " if losses else "")
        + "Overlap at depth j: mean of sum min(p, q) over anchors, each depth by itself, "
        + ("on held-out sequences. " if evals else "on the training batch. ")
        + "Scored acceptance length: expected tokens per target forward under rejection sampling, heads re-run "
        + "on held-out sequences that the policy sampled; bars are 95 % intervals. "
        + (f"Temperature {', '.join(f'{t:g}' for t in temperatures)}." if temperatures else "")
    )
    return _figure(run_dir, "Training of the heads", "sft_curves", (train, evals), caption)


def _scores(records: Sequence[Record]) -> list[Record]:
    """The heads' first and last score on held-out sequences."""
    scored = [r for r in records if r["kind"] == "sft_eval" and isinstance(r.get("acceptance_length"), (int, float))]
    return [
        {
            "optimizer step": r["step"],
            "scored acceptance length": r["acceptance_length"],
            "standard error": r.get("acceptance_length_se"),
            **{f"overlap {j + 1}": alpha for j, alpha in enumerate(r.get("alpha", ()))},
            "anchors": r.get("num_anchors"),
        }
        for r in (scored[:1] + scored[-1:] if len(scored) > 1 else scored)
    ]


def _seconds(records: Sequence[Record]) -> list[Record]:
    seconds: dict[str, float] = {}
    for record in records:
        if record["kind"] == "stage":
            seconds[record["name"]] = seconds.get(record["name"], 0.0) + record["seconds"]
    if seconds:
        seconds["all"] = sum(seconds.values())
    return [{"stage": name, "wall seconds": round(value, 1)} for name, value in seconds.items()]


def _figure(run_dir: Path, title: str, name: str, arguments: tuple[Any, ...], caption: str) -> dict[str, str] | None:
    """Draw plots.<name> and save it as plots/<name>.png; None if it has no data."""
    from bebop.monitor.report import plots

    png = run_dir / PLOTS / f"{name}.png"
    drawn = getattr(plots, name)(*arguments)
    if drawn is None:
        png.unlink(missing_ok=True)
        return None
    png.parent.mkdir(exist_ok=True)
    plots.save(drawn, str(png))
    return {"title": title, "caption": caption, "png": base64.b64encode(png.read_bytes()).decode()}
