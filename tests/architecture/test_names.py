"""Names of tests state a promise in at most ten words."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_names_of_tests_have_at_most_ten_words():
    names = {name for file in TESTS.rglob("test_*.py") for name in re.findall(r"def test_(\w+)\(", file.read_text())}
    assert not [name for name in names if len(name.split("_")) > 10]
