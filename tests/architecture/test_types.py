"""The rooms whose types are complete stay so: mypy in its strict mode finds nothing in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TYPED = ("bebop.monitor", "bebop.spec", "bebop.losses", "bebop.acceptance", "bebop.records", "bebop_kernels")


def test_the_type_checker_finds_nothing(tmp_path):
    words = [word for name in TYPED for word in ("-p" if name != "bebop.records" else "-m", name)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), *words],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(ROOT / "kernels")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
