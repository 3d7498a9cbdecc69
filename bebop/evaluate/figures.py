"""The figures of `eval`, in the report's style: acceptance length against entropy, position and temperature, and the
positions where rejection sampling beats target-only acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bebop.acceptance import AnchorScores
from bebop.evaluate.slopes import EntropySlope
from bebop.monitor.report.plots import (
    GREY,
    INK,
    RED,
    colour_of,
    figure_of,
    finished,
    legend_below,
    save,
    styled,
)
from bebop.spec import RULES

LENGTH = "expected acceptance length\n[tokens per target forward]"
BINS = 12
MIN_BIN = 10  # a bin of fewer positions is not drawn


def write_figures(
    run_dir: Path, sweep: Mapping[float, AnchorScores], slopes: Mapping[float, EntropySlope]
) -> list[str]:
    """Write PNGs for the first temperature, and for the sweep if it has several temperatures; returns their names."""
    first = next(iter(sweep))
    figures = {
        "acceptance_over_entropy.png": over_entropy(sweep[first], slopes[first], first),
        "acceptance_over_position.png": over_position(sweep[first], first),
        "rejection_or_target_only.png": boundary(sweep[first], first),
    }
    if len(sweep) > 1:
        figures["acceptance_over_temperature.png"] = over_temperature(sweep)
    for name, figure in figures.items():
        save(figure, str(run_dir / name))
    return list(figures)


@styled
def over_entropy(scores: AnchorScores, slope: EntropySlope, temperature: float) -> Figure:
    """Mean acceptance length by even bins of the entropy, and the line fitted to all positions."""
    h = scores.entropy_nats.numpy()
    figure, (axes,) = figure_of(1)
    _binned(axes, scores, h, np.linspace(h.min(), h.max(), BINS + 1))
    if slope.status == "ok":
        grid = np.array([h.min(), h.max()])
        label = f"line, rejection sampling: {slope.slope:+.3f} [{slope.low:+.3f}, {slope.high:+.3f}] per nat"
        axes.plot(grid, slope.intercept + slope.slope * grid, color=INK, linestyle=":", label=label)
    title = f"Acceptance length against target entropy, T = {temperature:g}"
    return finished(figure, axes, title, xlabel="target entropy [nats]", ylabel=LENGTH)


@styled
def over_position(scores: AnchorScores, temperature: float) -> Figure:
    """Mean acceptance length by the position in the response."""
    position = scores.position.numpy().astype(float)
    figure, (axes,) = figure_of(1)
    _binned(axes, scores, position, np.unique(np.quantile(position, np.linspace(0, 1, BINS + 1)).round()))
    title = f"Acceptance length against position, T = {temperature:g}"
    return finished(figure, axes, title, xlabel="token of the response that the draft follows", ylabel=LENGTH)


@styled
def boundary(scores: AnchorScores, temperature: float) -> Figure:
    """Positions at depth 1 by d_TV and 1 - p(argmax q); below the diagonal rejection sampling accepts more."""
    x = 1 - scores.target_prob_of_draft_argmax[0].numpy()
    y = 1 - scores.alpha[0].numpy()
    figure, (axes,) = figure_of(1)
    shown = axes.hexbin(x, y, gridsize=40, extent=(0, 1, 0, 1), bins="log", cmap="Blues", mincnt=1)
    figure.colorbar(shown, ax=axes, pad=0.02, label="positions")
    share = float((y < x).mean())
    axes.plot(
        [0, 1], [0, 1], color=RED, label=f"equal; below it ({share:.0%} of positions) rejection sampling accepts more"
    )
    return finished(
        figure,
        axes,
        f"Rejection sampling or target-only, depth 1, T = {temperature:g}",
        xlabel="1 - p(argmax q), rejected by target-only",
        ylabel="d_TV, rejected by\nrejection sampling",
    )


@styled
def over_temperature(sweep: Mapping[float, AnchorScores]) -> Figure:
    """Mean acceptance length and entropy at every temperature."""
    figure, (upper, lower) = figure_of(2, height=5.2, sharex=True)
    temperatures = sorted(sweep)
    for number, rule in enumerate(RULES):
        y = [sweep[t].length(rule).mean().item() for t in temperatures]
        upper.plot(temperatures, y, color=colour_of(number), marker="o", markersize=4, label=RULES[rule].title)
    upper.set_ylabel(LENGTH)
    upper.set_title("Acceptance length and entropy over temperatures")
    lower.plot(temperatures, [sweep[t].entropy_nats.mean().item() for t in temperatures], color=GREY, marker="o")
    lower.set(xlabel="sampling temperature", ylabel="target entropy\n[nats]")
    legend_below(figure)
    return figure


def _binned(axes: Any, scores: AnchorScores, x: np.ndarray, edges: np.ndarray) -> None:
    """Mean acceptance length in bins of x by rule, with 95 % bands over positions. Equal curves hide each other."""
    which = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, max(0, len(edges) - 2))
    bins = [b for b in np.unique(which) if (which == b).sum() >= MIN_BIN]
    for number, rule in enumerate(RULES if bins else ()):
        colour, length, points = colour_of(number), scores.length(rule).numpy(), []
        for b in bins:
            inside = length[which == b]
            error = inside.std(ddof=1) / len(inside) ** 0.5
            points.append((x[which == b].mean(), inside.mean(), 1.96 * error))
        centre, mean, half = np.array(points).T
        axes.fill_between(centre, mean - half, mean + half, color=colour, alpha=0.13, linewidth=0)
        axes.plot(centre, mean, color=colour, marker="o", markersize=4, label=RULES[rule].title)
