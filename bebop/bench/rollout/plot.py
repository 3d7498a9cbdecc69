"""The planner's plot: predicted speed against plain decoding, by batch size, one line per draft length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bebop.monitor.report.plots import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, figure_of, legend_below, save, styled

COLOURS = (SKY, BLUE, GREEN, ORANGE, RED, PURPLE)


def write(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    """table: rows of plan.csv."""
    save(figure(table), str(path))


@styled
def figure(table: Sequence[Mapping[str, Any]]) -> Figure:
    """Rings mark the chosen lengths; the dashed line is the engine without speculation."""
    page, (axes,) = figure_of(1)
    for k in sorted({row["k"] for row in table if row["k"] != "none"}):
        line = [row for row in table if row["k"] == k]
        sizes, gains = [row["batch_size"] for row in line], [row["speedup"] for row in line]
        colour = COLOURS[k % len(COLOURS)]
        axes.plot(sizes, gains, "o-", color=colour, label=f"k = {k}")
        chosen = [(row["batch_size"], row["speedup"]) for row in line if row["chosen"]]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), "o", markersize=12, markerfacecolor="none", color=colour)
    axes.axhline(1.0, linestyle="--", color="grey")
    axes.set_xscale("log", base=2)
    sizes = sorted({row["batch_size"] for row in table})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="requests in the batch", ylabel="tokens/s over plain decoding's")
    axes.set_title("Predicted speed by draft length; rings: chosen")
    legend_below(page)
    return page
