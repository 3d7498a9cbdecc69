"""The report's figures, each a function of records that returns a matplotlib figure, or None if it has no data.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; bands are 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bebop.monitor.decomposition import Decomposition, current, slope_of, split_by_definition
from bebop.monitor.regression import Array
from bebop.monitor.slope import Slope
from bebop.records import StepRecord
from bebop.store.definitions import label_of

BLUE, RED, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
SERIES = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)
EARLIER = tuple(colour for colour in SERIES if colour != RED)
INK, GREY, PALE = "#1f2933", "#7b8794", "#e4e7eb"
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": PALE,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
WIDTH, HEIGHT = 7.4, 4.2  # inches


def styled(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    """Draw in this report's style, without touching matplotlib's global one."""

    @wraps(draw)
    def in_style(*args: Any, **options: Any) -> Figure | None:
        with rc_context(STYLE):
            return draw(*args, **options)

    return in_style


@styled
def acceptance_over_entropy(steps: Sequence[StepRecord], entropy_range: tuple[float, float] | None) -> Figure | None:
    """Acceptance length against target entropy, a line and band per draft length, rule and temperature."""
    groups = split_by_definition(steps)
    if not groups:
        return None
    figure, (axes,) = figure_of(1)
    newest = list(groups)[-1]
    for number, (definition, group) in enumerate(groups.items()):
        colour = RED if definition == newest else colour_of(number, EARLIER)
        h = np.array([step.entropy_nats for step in group])
        al = np.array([step.acceptance_length for step in group])
        if definition == newest:
            steps_of_points = [step.step for step in group]
            shown = axes.scatter(h, al, c=steps_of_points, cmap="viridis_r", s=34, zorder=3, edgecolor="white")
            bar = figure.colorbar(shown, ax=axes, pad=0.02, aspect=30)
            bar.set_label("RL step")
            bar.locator = MaxNLocator(nbins=6, integer=True)
            bar.outline.set_visible(False)
        else:
            axes.scatter(h, al, color=colour, s=22, alpha=0.6)
        _line(axes, str(definition), slope_of(group), h, colour)
    if entropy_range:
        left, right = axes.get_xlim()
        for edge in entropy_range:
            if left <= edge <= right:
                axes.axvline(edge, color=GREY, linestyle="--", linewidth=1)
                axes.annotate(
                    " edge of the pre-RL data", (edge, 0.02), xycoords=("data", "axes fraction"), color=GREY, fontsize=8
                )
    return finished(
        figure,
        axes,
        "Acceptance length against target entropy",
        xlabel=label_of("entropy_nats"),
        ylabel=label_of("acceptance_length").replace(" [", "\n["),
    )


@styled
def over_steps(steps: Sequence[StepRecord], entropy_range: tuple[float, float] | None) -> Figure | None:
    """Acceptance length, entropy and reward, one panel each, over RL steps."""
    fields = [("acceptance_length", BLUE), ("entropy_nats", GREEN), ("reward_mean", RED)]
    fields = [(name, colour) for name, colour in fields if any(getattr(step, name) is not None for step in steps)]
    if not fields:
        return None
    figure, panels = figure_of(len(fields), height=1.3 + 1.9 * len(fields), sharex=True)
    for axes, (name, colour) in zip(panels, fields, strict=True):
        x, y = _series(steps, lambda step, name=name: getattr(step, name))
        axes.plot(x, y, color=colour, alpha=0.35, linewidth=1, marker="o", markersize=3)
        if len(y) >= 5:
            axes.plot(x[2:-2], np.convolve(y, np.ones(5) / 5, "valid"), color=colour, label="mean of 5 steps")
            axes.legend(loc="best", fontsize=8)
        axes.set_ylabel(label_of(name).replace(" [", "\n["), fontsize=9)
        if name == "entropy_nats" and entropy_range:
            low, high = axes.get_ylim()
            for edge in entropy_range:
                if low <= edge <= high:
                    axes.axhline(edge, color=GREY, linestyle="--", linewidth=1)
    panels[0].set_title("Acceptance length, entropy and reward over RL steps")
    panels[-1].set_xlabel("RL step")
    return figure


@styled
def conditional_acceptance(steps: Sequence[StepRecord]) -> Figure | None:
    """Conditional acceptance at each depth over steps, with binomial 95 % bands from the counts."""
    drafted = current(steps)
    depth = max((len(step.counts.accepted_per_depth) for step in drafted), default=0)
    if not depth:
        return None
    figure, (axes,) = figure_of(1)
    for j in range(depth):
        colour = colour_of(j)
        reached = [
            (step, (step.counts.num_drafts, *step.counts.accepted_per_depth)[j])
            for step in drafted
            if j < len(step.counts.accepted_per_depth)
        ]
        rows = [(step.step, step.counts.accepted_per_depth[j] / n, n) for step, n in reached if n]
        if not rows:
            continue
        x, share, n = np.array(rows).T
        half = 1.96 * np.sqrt(share * (1 - share) / n)
        axes.fill_between(
            x, np.clip(share - half, 0, 1), np.clip(share + half, 0, 1), color=colour, alpha=0.15, linewidth=0
        )
        axes.plot(x, share, color=colour, marker="o", markersize=3, label=f"depth {j + 1}")
    return finished(
        figure, axes, "Accepted at each depth, given all before it", xlabel="RL step", ylabel="conditional acceptance"
    )


@styled
def decomposition(parts: Decomposition) -> Figure | None:
    """What moved the acceptance length: the entropy part and the mismatch, each with its band."""
    if parts.early_steps is None or not parts.parts:
        return None
    figure, (axes,) = figure_of(1)
    x = [part.step for part in parts.parts]
    axes.axvspan(*parts.early_steps, color=PALE, alpha=0.6, linewidth=0, label="early phase, line fitted here")
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(
        x,
        [part.change for part in parts.parts],
        color=INK,
        linewidth=1,
        linestyle=":",
        label="change of acceptance length",
    )
    for name, colour, label in (("entropy", GREEN, "by entropy"), ("mismatch", RED, "mismatch (the rest)")):
        estimates = [getattr(part, name) for part in parts.parts]
        axes.fill_between(
            x, [e.low for e in estimates], [e.high for e in estimates], color=colour, alpha=0.13, linewidth=0
        )
        axes.plot(x, [e.value for e in estimates], color=colour, label=label)
    if parts.recent and parts.recent_steps:
        first, last = parts.recent_steps
        recent = parts.recent
        error = [[recent.value - recent.low], [recent.high - recent.value]]
        label = f"mean mismatch, steps {first} to {last}"
        axes.errorbar(
            [(first + last) / 2], [recent.value], yerr=error, color=INK, marker="D", capsize=4, label=label, zorder=4
        )
    change = "change of acceptance length\n[tokens per target forward]"
    return finished(figure, axes, "Where the change comes from", xlabel="RL step", ylabel=change)


@styled
def sft_curves(train: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Loss, acceptance per depth and scored acceptance length over the heads' optimizer steps."""
    panels = [
        ("loss", _numbers(train, "loss"), "training loss"),
        ("alpha", [r for r in evals if r.get("alpha")] or [r for r in train if r.get("alpha")], "overlap per depth"),
        ("acceptance_length", _numbers(evals, "acceptance_length"), "scored acceptance length"),
    ]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return None
    figure, axes_list = figure_of(len(panels), height=1.3 + 2.0 * len(panels), sharex=True)
    for axes, (name, records, label) in zip(axes_list, panels, strict=True):
        x = [record["step"] for record in records]
        if name == "alpha":
            depth = min(len(record["alpha"]) for record in records)
            for j in range(depth):
                y = [record["alpha"][j] for record in records]
                axes.plot(x, y, color=colour_of(j), marker="o", markersize=3, label=f"depth {j + 1}")
            axes.legend(fontsize=8, ncols=depth)
        else:
            y = [record[name] for record in records]
            error = [record.get("acceptance_length_se") for record in records]
            if name == "acceptance_length" and None not in error:
                axes.errorbar(x, y, yerr=1.96 * np.array(error), color=BLUE, marker="o", markersize=4, capsize=3)
            else:
                axes.plot(x, y, color=INK)
        axes.set_ylabel(label, fontsize=9)
    axes_list[0].set_title("Training of the MTP heads")
    axes_list[-1].set_xlabel("optimizer step")
    return figure


def save(figure: Figure, path: str) -> None:
    """Write a figure as PNG."""
    FigureCanvasAgg(figure)
    with rc_context(STYLE):
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")


def figure_of(rows: int, height: float = HEIGHT, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` panels below each other; options go to matplotlib's subplots."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
    for axes in panels:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    return figure, list(panels)


def _line(axes: Axes, name: str, slope: Slope, entropy: Array, colour: str) -> None:
    """The fitted line with its band over the observed entropies, or the reason why there is none, in the legend."""
    if slope.fit is None:
        axes.plot([], [], color=colour, label=f"{name}: slope undetermined, {slope.reason}")
        return
    grid = np.linspace(entropy.min(), entropy.max(), 60)
    value, low, high = np.array([slope.fit.line(float(x)) for x in grid]).T
    axes.fill_between(grid, low, high, color=colour, alpha=0.15, linewidth=0)
    fit = slope.fit
    label = f"{name}: {fit.slope:+.2f} [{fit.low:+.2f}, {fit.high:+.2f}] per nat, {slope.n} steps"
    axes.plot(grid, value, color=colour, label=label)


def finished(figure: Figure, axes: Axes, title: str, **labels: str) -> Figure:
    """A figure whose panel is drawn, with a title, labels of the axes and a legend below."""
    axes.set(title=title, **labels)
    legend_below(figure)
    return figure


def legend_below(figure: Figure) -> None:
    """The first panel's legend, under the figure in as many columns as fit."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        columns = max(1, min(4, len(labels), 120 // (max(map(len, labels)) + 12)))
        figure.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize=8.5)


def _series(steps: Sequence[StepRecord], value_of: Any) -> tuple[Array, Array]:
    pairs = [(step.step, value_of(step)) for step in steps if value_of(step) is not None]
    return np.array([x for x, _ in pairs], dtype=float), np.array([y for _, y in pairs], dtype=float)


def _numbers(records: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    return [record for record in records if isinstance(record.get(key), (int, float))]


def colour_of(number: int, series: Sequence[str] = SERIES) -> str:
    """The colours one after the other, round and round."""
    return series[number % len(series)]
