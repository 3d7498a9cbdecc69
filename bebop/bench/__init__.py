"""bench: measurements, one module per suite (`bench.suite`). Each prints a table and writes a CSV and summary.json."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bebop.config import BenchConfig

SUITES = {
    "rollout": "bebop.bench.rollout.stage",
    "kernels": "bebop.bench.kernels",
    "tree": "bebop.bench.tree.stage",
}


def run(config: BenchConfig, run_dir: Path) -> dict[str, Any]:
    """Run the suite that the config names; returns what it wrote to summary.json."""
    return importlib.import_module(SUITES[config.bench.suite]).run(config, run_dir)
