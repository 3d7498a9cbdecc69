"""The planner's plot: predicted speed against plain decoding, by batch size, one line per draft length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bebop.monitor.report.plots import colour_of, figure_of, finished, save, styled


def write(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    """table: rows of plan.csv."""
    save(figure(table), str(path))


@styled
def figure(table: Sequence[Mapping[str, Any]]) -> Figure:
    """Rings mark the chosen lengths; the dashed line is the engine without speculation."""
    figure, (axes,) = figure_of(1)
    for k in sorted({row["k"] for row in table if row["k"] != "none"}):
        line = [row for row in table if row["k"] == k]
        axes.plot(*_points(line), "o-", color=colour_of(k), label=f"k = {k}")
        if chosen := [row for row in line if row["chosen"]]:
            axes.plot(*_points(chosen), "o", markersize=12, markerfacecolor="none", color=colour_of(k))
    axes.axhline(1.0, linestyle="--", color="grey")
    axes.set_xscale("log", base=2)
    sizes = sorted({row["batch_size"] for row in table})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    title = "Predicted speed by draft length; rings: chosen"
    return finished(figure, axes, title, xlabel="requests in the batch", ylabel="tokens/s over plain decoding's")


def _points(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    return [row["batch_size"] for row in rows], [row["speedup"] for row in rows]
