"""Tables for the console, Markdown and HTML, by `tabulate`; and CSV files."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tabulate import tabulate

from bebop.errors import BadInput
from bebop.store.files import replacing

Rows = Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]
STYLES = {"console": "simple", "markdown": "pipe", "html": "html"}  # bebop's name -> tabulate's


def format_table(rows: Rows, header: Sequence[str] | None = None, *, style: str = "console") -> str:
    """Rows as a table, "" without any; columns of numbers are aligned right.

    rows: sequences of one length, or mappings, whose keys are the header (the keys of all rows, in order).
    style: "console", "markdown" or "html" (escaped). Raises BadInput on rows of different lengths.
    """
    if header is None:
        header = list(dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row))
    cells = [[row.get(key) for key in header] if isinstance(row, Mapping) else list(row) for row in rows]
    lengths = {len(row) for row in cells} | ({len(header)} if header else set())
    if len(lengths) > 1:
        raise BadInput(f"rows: got lengths {sorted(lengths)}, expected one length for all rows and the header")
    if not lengths:
        return ""
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(lengths.pop())]
    table: str = tabulate(
        [[text(value) for value in row] for row in cells],
        headers=list(header),
        tablefmt=STYLES[style] if header or style != "console" else "plain",
        disable_numparse=True,
        colalign=["right" if is_right else "left" for is_right in right],
    )
    return "\n".join(line.rstrip() for line in table.splitlines())


def print_table(
    rows: Rows, header: Sequence[str] | None = None, *, title: str | None = None, file: TextIO | None = None
) -> None:
    """Print `format_table`, under a title if there is one."""
    table = format_table(rows, header)
    print("\n".join(part for part in (title, table) if part), file=file or sys.stdout, flush=True)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write mappings as a CSV file, whole or not at all. Columns: the keys of all rows, in order of appearance."""
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def text(value: Any, digits: int = 3) -> str:
    """A value for a reader: floats with `digits` decimals, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.{digits}f}" if abs(value) >= 10**-digits or value == 0 else f"{value:.1e}"
    return str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
