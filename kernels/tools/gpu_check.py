"""python kernels/tools/gpu_check.py: on a GPU, compare the Triton kernels with float64, then time them and baselines.

Takes at most about four minutes. Prints one line per shape, appends the times to gpu_check.csv, and exits non-zero if a
value is off. `--interpret` checks small shapes under Triton's interpreter on a CPU and times nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

SMALL = (5, 127, 1000)
LARGE = (32000, 49152, 151936, 250880)
BENCH = Path(__file__).resolve().parent.parent / "bench"


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="check small shapes on a CPU, in Triton's interpreter")
    parser.add_argument("--csv", type=Path, default=Path("gpu_check.csv"), help="append the times to this file")
    arguments = parser.parse_args()
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not arguments.interpret and not torch.cuda.is_available():
        print("gpu_check: torch found no GPU; run this on a machine with a GPU, or pass --interpret", file=sys.stderr)
        return 2
    off = check(SMALL if arguments.interpret else SMALL + LARGE, "cpu" if arguments.interpret else "cuda")
    if off or arguments.interpret:
        return int(off > 0)
    words = ["--rows", "4096", "--vocab-sizes", "151936", "--width", "2048", "--repeats", "5"]
    timed = subprocess.run([sys.executable, str(BENCH), *words, "--csv", str(arguments.csv)], check=False, timeout=180)
    return timed.returncode


def check(vocab_sizes: tuple[int, ...], device: str) -> int:
    """Print each shape with its errors; return how many are off."""
    import oracle
    import torch

    off = 0
    for dtype in (torch.float32, torch.bfloat16):
        for vocab_size in vocab_sizes:
            verdict = oracle.judge("triton", oracle.ROWS, vocab_size, dtype, device)
            off += not verdict.holds
            print(f"{'ok ' if verdict.holds else 'OFF'} V={vocab_size} {dtype}: {verdict}", flush=True)
    return off


if __name__ == "__main__":
    sys.exit(main())
