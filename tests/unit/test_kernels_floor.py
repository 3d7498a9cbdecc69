"""The counted costs of the kernels, and the table of them that kernels/README.md shows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def floor():
    spec = importlib.util.spec_from_file_location("kernels_bench_floor", ROOT / "kernels" / "bench" / "floor.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_counts_of_a_shape_worked_by_hand(floor):
    """N 2, V 10, D 4, K 1: three target rows; products 2 * 10 * 4 * (2 * 2 + 3) = 560 FLOP."""
    found = floor.count("ours", 2, 10, 4, 1)
    assert found.flop == 560
    assert found.moved == 16 * 20 + 4 * 30 + 2 * 4 * (10 + 4 + 3)
    assert floor.count("two-pass", 2, 10, 4, 1).peak == 2 * (20 + 30)


def test_the_readme_shows_the_table_as_it_is_counted(floor):
    assert floor.table() in (ROOT / "kernels" / "README.md").read_text()


def test_gpu_check_without_a_gpu_says_so_in_one_line():
    command, hidden = [sys.executable, ROOT / "kernels" / "gpu_check.py"], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: torch sees no GPU here") and done.stderr.count("\n") == 1
