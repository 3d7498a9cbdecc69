"""bench kernels: compare bebop_kernels with baselines, by running kernels/bench in a process of its own.

In a fresh process, peak memory is that of the kernels, and torch.compile starts cold. The rows go to bench.csv; the
shapes are those in `bench.kernels`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bebop.config import BenchConfig
from bebop.errors import BenchError
from bebop.monitor import write_summary

SCRIPT = Path(__file__).resolve().parent.parent.parent / "kernels" / "bench"


def run(config: BenchConfig, run_dir: Path) -> dict[str, Any]:
    """Measure, print tables, append to bench.csv and write summary.json in run_dir; returns the summary.

    summary.json: `rows`, one per case and implementation, and `left_out`, why a baseline did not run.
    """
    section, rows = config.bench.kernels, run_dir / "bench.json"
    words: list[object] = [sys.executable, SCRIPT, "--repeats", config.bench.repeats, "--csv", run_dir / "bench.csv"]
    words += ["--json", rows, "--rows", *section.rows, "--vocab-sizes", *section.vocab_sizes]
    words += ["--width", section.width, "--depth", section.depth]
    done = subprocess.run([str(word) for word in words], check=False)
    if done.returncode:
        raise BenchError(f"kernels/bench ended with exit code {done.returncode}; its message is above")
    summary = json.loads(rows.read_text())
    rows.unlink()
    write_summary(run_dir, summary)
    return summary
