"""One table for several training runs, for example a sweep over losses: acceptance per depth and task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.store.files import read_json
from bebop.store.run_folder import SUMMARY
from bebop.store.tables import format_table, write_csv

TABLE = "comparison.csv"


def compare(folders: Sequence[Path], where: Path) -> str:
    """Read summary.json of every run in `folders`, write where/comparison.csv, and return its table as Markdown.

    Rows: runs. Columns: expected acceptance length under rejection sampling (tokens per target forward) on all held-out
    sequences with its standard error, P(depth j accepted | depth j-1 accepted), and the length by task.
    """
    rows = [_row(folder.name, read_json(folder / SUMMARY)) for folder in folders]
    write_csv(where / TABLE, rows)
    return format_table(rows, style="markdown")


def _row(name: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    depths = {f"depth {j + 1}": share for j, share in enumerate(summary["conditional"])}
    tasks = {task: scored["acceptance_length"] for task, scored in sorted(summary["tasks"].items())}
    length = {"AL": summary["acceptance_length"], "se": summary["acceptance_length_se"]}
    return {"run": name, **length, **depths, **tasks}
