"""One table of several training runs: acceptance per depth and task, of a sweep over losses and the like."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.store.run_folder import read_json

TABLE = "comparison.csv"


def compare(folders: Sequence[Path], where: Path) -> str:
    """Read summary.json of every run in `folders`, write where/comparison.csv, and return its table as Markdown.

    Rows: runs. Columns: expected acceptance length under rejection sampling (tokens per target forward) of all
    held-out text with its standard error, P(depth j accepted | depth j-1 accepted), and the length by task.
    """
    rows = [_row(folder.name, read_json(folder / "summary.json")) for folder in folders]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (where / TABLE).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(name: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    depths = {f"depth {j + 1}": share for j, share in enumerate(summary["conditional"])}
    tasks = {task: scored["acceptance_length"] for task, scored in sorted(summary["tasks"].items())}
    length = {"AL": summary["acceptance_length"], "se": summary["acceptance_length_se"]}
    return {"run": name, **length, **depths, **tasks}


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)
