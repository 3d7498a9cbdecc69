"""Aligned plain text tables for the console."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from bebop.errors import BadInput


def format_table(
    rows: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]], header: Sequence[str] | None = None
) -> str:
    """Rows of one length, or mappings whose keys are the header, as aligned columns; numbers stand to the right."""
    if rows and isinstance(rows[0], Mapping):
        header = list(rows[0]) if header is None else list(header)
        rows = [[row.get(key) for key in header] for row in rows]
    lengths = {len(row) for row in rows} | ({len(header)} if header else set())
    if len(lengths) > 1:
        raise BadInput(f"rows: lengths {sorted(lengths)} came, expected one length for all rows and the header")
    cells = [[text(value) for value in row] for row in rows]
    shown = ([list(header)] if header else []) + cells
    if not shown:
        return ""
    widths = [max(len(line[i]) for line in shown) for i in range(len(shown[0]))]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(widths))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in shown
    ]
    if header:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def print_table(
    rows: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
    header: Sequence[str] | None = None,
    *,
    title: str | None = None,
    file: TextIO | None = None,
) -> None:
    """Print `format_table`, under a title if there is one."""
    table = format_table(rows, header)
    print("\n".join(part for part in (title, table) if part), file=file or sys.stdout, flush=True)


def text(value: Any, digits: int = 3) -> str:
    """A value as a reader wants it: floats with `digits` decimals, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.{digits}f}" if abs(value) >= 10**-digits or value == 0 else f"{value:.1e}"
    return str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
