"""Every Triton kernel and tile compiles ahead of time for two GPUs, and keeps its values in registers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

AOT = Path(__file__).resolve().parents[2] / "kernels" / "tools" / "aot.py"


@pytest.mark.e2e
def test_every_kernel_compiles_for_sm_90_and_gfx942_without_spills(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", str(AOT), "fp32", "bf16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    lines = [line.split() for line in done.stdout.splitlines()]
    launched = set(
        itertools.product(("sm_90", "gfx942"), ("row_sums", "row_overlap", "row_gradient", "row_statistics"))
    )
    assert launched <= {(line[0], line[1]) for line in lines}
    assert len(lines) == 2 * (1 + 2 * 2 * 8)
    for line in lines:
        registers, spilled = int(line[-3]), int(line[-1])
        assert spilled == 0, line
        assert 0 < registers <= 255, line
