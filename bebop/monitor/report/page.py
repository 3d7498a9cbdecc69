"""Parts of the report's HTML page: all text is escaped here, images are embedded, nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bebop.store.tables import text

CSS = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 62rem; margin: 2.5rem auto;
       padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; }
.muted, figcaption, small { color: #52606d; } .muted { margin: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: .8rem; margin: 1.6rem 0; }
.card { border: 1px solid #e4e7eb; border-radius: .5rem; padding: .8rem 1rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.3; } .card span { font-weight: 600; }
.card small { display: block; font-size: .8rem; line-height: 1.4; margin-top: .3rem; }
.decision { border-left: .35rem solid #7b8794; background: #f5f7fa; padding: .9rem 1.2rem; margin: 1.6rem 0; }
.decision.yes { border-color: #d55e00; } .decision.no { border-color: #009e73; }
.decision.alarm { border-color: #b00020; background: #fdecee; }
.decision b { font-size: 1.1rem; }
figure { margin: 1rem 0 0; } figure img { width: 100%; max-width: 46rem; display: block; }
figcaption { font-size: .88rem; max-width: 46rem; margin-top: .4rem; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #e4e7eb; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin: .8rem 0; } summary { cursor: pointer; color: #0072b2; }
pre { background: #f5f7fa; padding: .8rem 1rem; overflow-x: auto; font-size: .82rem; }
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole HTML document."""
    parts = "\n".join(part for part in body if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>'
        f"<body>\n{parts}\n</body></html>\n"
    )


def heading(words: str, level: int = 2) -> str:
    return f"<h{level}>{escape(words)}</h{level}>"


def paragraph(words: str, css: str = "") -> str:
    return f'<p class="{css}">{escape(words)}</p>' if css else f"<p>{escape(words)}</p>"


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Boxes of (name, value, definition)."""
    boxes = (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(meaning)}</small></div>'
        for name, value, meaning in items
    )
    return f'<div class="cards">{"".join(boxes)}</div>'


def decision_box(word: str, reason: str, update: bool | None) -> str:
    css = {True: "yes", False: "no", None: ""}[update]
    return (
        f'<div class="decision {css}"><b>Update the heads online? {escape(word[:1].upper() + word[1:])}.</b><br>'
        f"{escape(reason[:1].upper() + reason[1:])}.</div>"
    )


def alarm_box(words: str) -> str:
    return f'<div class="decision alarm"><b>Alarm.</b> {escape(words[:1].upper() + words[1:])}.</div>'


def figure(png: Path, caption: str) -> str:
    """An embedded image with its caption, which doubles as the alternative text."""
    data = base64.b64encode(png.read_bytes()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under a header; numbers stand to the right."""
    if not rows:
        return ""
    number = [all(row[i] is None or isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    css = [' class="number"' if is_number else "" for is_number in number]
    head = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(css, header, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{escape(text(v))}</td>" for c, v in zip(css, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def key_values(values: Mapping[str, Any]) -> str:
    return table(
        ["", ""], [[key, text(value) if isinstance(value, float) else str(value)] for key, value in values.items()]
    )


def details(summary: str, inner: str) -> str:
    """A part that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>" if inner else ""


def preformatted(words: str) -> str:
    return f"<pre>{escape(words)}</pre>"
