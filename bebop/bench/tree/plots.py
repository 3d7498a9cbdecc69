"""The two plots of bench tree: acceptance length against temperature, and against RheoSampling's m."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bebop.monitor.report.plots import colour_of, figure_of, finished, save, styled
from bebop.spec import RULES

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
    for number, name in enumerate(dict.fromkeys(row["variant"] for row in rows)):
        line = [row for row in rows if row["variant"] == name]
        _points(axes, line, "temperature", name, colour_of(number), dashed=line[0]["method"] in RULES)
    return finished(figure, axes, "Acceptance length against temperature", xlabel="sampling temperature", ylabel=LABEL)


@styled
def by_leads(rows: Rows) -> Figure | None:
    """One line per temperature, TopK as a dashed level beside it; bars are one standard error."""
    rheo = [row for row in rows if row["method"] == "rheo"]
    if len({row["leads"] for row in rheo}) < 2:
        return None
    figure, (axes,) = figure_of(1)
    for number, temperature in enumerate(dict.fromkeys(row["temperature"] for row in rheo)):
        line = [row for row in rheo if row["temperature"] == temperature]
        colour = colour_of(number)
        _points(axes, line, "leads", f"T = {temperature:g}", colour)
        for row in rows:
            if row["method"] == "topk" and row["temperature"] == temperature:
                axes.axhline(row["acceptance_length"], color=colour, linestyle="--", linewidth=1)
    axes.set_xticks(sorted({row["leads"] for row in rheo}))
    return finished(
        figure, axes, "Acceptance length against the number of leads", xlabel="leads m (dashed: TopK)", ylabel=LABEL
    )


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
