"""The two plots of bench tree: acceptance length against temperature, and against RheoSampling's m."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bebop.monitor.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    figure_of,
    legend_below,
    save,
    styled,
)

COLOURS = {"chain": GREY, "block": PURPLE, "topk": BLUE, "rrsw": ORANGE, "rheo": RED}
OF_LEADS = (GREEN, RED, SKY, PURPLE)  # m = 0, 1, 2, 3
LABEL = "acceptance length\n[tokens per target forward]"
Rows = Sequence[Mapping[str, Any]]


def write(rows: Rows, folder: Path) -> list[Path]:
    """Both plots of the first batch size's rows as PNG files; one that has nothing to show is left out."""
    rows = [row for row in rows if row["batch_size"] == rows[0]["batch_size"] and row["rounds"]]
    written = []
    for name, figure in (("al_by_temperature", by_temperature(rows)), ("al_by_leads", by_leads(rows))):
        if figure is not None:
            save(figure, str(folder / f"{name}.png"))
            written.append(folder / f"{name}.png")
    return written


@styled
def by_temperature(rows: Rows) -> Figure | None:
    """One line per variant; bars are one standard error."""
    if len({row["temperature"] for row in rows}) < 2:
        return None
    figure, (axes,) = figure_of(1)
    for name in dict.fromkeys(row["variant"] for row in rows):
        line = [row for row in rows if row["variant"] == name]
        method, leads = line[0]["method"], line[0]["leads"]
        colour = OF_LEADS[leads % len(OF_LEADS)] if method == "rheo" else COLOURS[method]
        _points(axes, line, "temperature", name, colour, dashed=method in ("chain", "block"))
    axes.set(xlabel="sampling temperature", ylabel=LABEL)
    axes.set_title("Acceptance length against temperature")
    legend_below(figure)
    return figure


@styled
def by_leads(rows: Rows) -> Figure | None:
    """One line per temperature, TopK as a dashed level beside it; bars are one standard error."""
    rheo = [row for row in rows if row["method"] == "rheo"]
    if len({row["leads"] for row in rheo}) < 2:
        return None
    figure, (axes,) = figure_of(1)
    colours = (BLUE, GREEN, ORANGE, RED, PURPLE, SKY)
    for number, temperature in enumerate(dict.fromkeys(row["temperature"] for row in rheo)):
        line = [row for row in rheo if row["temperature"] == temperature]
        colour = colours[number % len(colours)]
        _points(axes, line, "leads", f"T = {temperature:g}", colour)
        for row in rows:
            if row["method"] == "topk" and row["temperature"] == temperature:
                axes.axhline(row["acceptance_length"], color=colour, linestyle="--", linewidth=1)
    axes.set(xlabel="leads m (dashed: TopK)", ylabel=LABEL)
    axes.set_xticks(sorted({row["leads"] for row in rheo}))
    axes.set_title("Acceptance length against the number of leads")
    legend_below(figure)
    return figure


def _points(axes: Any, line: Rows, key: str, name: str, colour: str, dashed: bool = False) -> None:
    axes.errorbar(
        [row[key] for row in line],
        [row["acceptance_length"] for row in line],
        yerr=[row["acceptance_length_error"] for row in line],
        label=name,
        color=colour,
        linestyle="--" if dashed else "-",
        marker="o",
        markersize=4,
        capsize=2,
    )
