"""The counted costs of the kernels, their table in kernels/README.md, and the GPU check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import floor

ROOT = Path(__file__).resolve().parents[2]


def test_counts_equal_those_of_a_shape_worked_by_hand():
    """N 2, V 10, D 4, K 1: three target rows; products 2 * 10 * 4 * (2 * 2 + 3) = 560 FLOP."""
    cost = floor.count("ours", 2, 10, 4, 1)
    assert cost.flop == 560
    assert cost.moved == 16 * 20 + 4 * 30 + 2 * 4 * (10 + 4 + 3)
    assert floor.count("two-pass", 2, 10, 4, 1).peak == 2 * (20 + 30)


def test_the_readme_shows_the_counted_table():
    assert floor.table() in (ROOT / "kernels" / "README.md").read_text()


def test_gpu_check_without_a_gpu_says_so_in_one_line():
    command, hidden = [sys.executable, ROOT / "kernels" / "tools" / "gpu_check.py"], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: torch found no GPU") and done.stderr.count("\n") == 1
