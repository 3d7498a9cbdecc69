"""The Python examples of docs/extending.md that stand on their own run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.split("## Using parts of bebop from Python")[1], re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_an_example_runs(number, capsys):
    exec(compile(EXAMPLES[number], f"example {number}", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_there_are_no_other_examples():
    assert len(EXAMPLES) == 3
