"""python kernels/bench: compare the kernels with baselines in one run. Prints a table and appends to a CSV.

Columns: `of_eager` is eager's time divided by this time. `over_floor` is this time divided by the time that the machine
needs for the least bytes and FLOP of the case (`Case.floor_bytes`, `floor_flop`), at rates measured in the same run.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from implementations import Case, implementations
from measure import Cost, Rates, compare, rates

DTYPES = {"overlap": torch.float32, "linear": torch.bfloat16, "topk": torch.bfloat16}


def main() -> None:
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    conditions = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "versions": " ".join(f"{name} {_version(name)}" for name in ("torch", "numba", "triton")),
    }
    rows, left_out = [], {}
    machine = {kernel: rates(device, dtype) for kernel, dtype in DTYPES.items()}
    for case in cases(arguments):
        functions, unavailable = implementations(case, device)
        tensors = case.tensors(device)
        costs, failed = compare(functions, tensors, arguments.repeats)
        del tensors
        measured = [_row(case, name, cost, costs, machine[case.kernel]) | conditions for name, cost in costs.items()]
        print_table(measured)
        append(arguments.csv, measured)
        rows += measured
        left_out |= {f"{case.kernel} {name}": reason for name, reason in (unavailable | failed).items()}
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "left_out": left_out}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kernels/bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[256, 1024], help="rows of logits, and anchors of the linear form"
    )
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--width", type=int, default=576, help="width of the hidden states")
    parser.add_argument("--depth", type=int, default=3, help="draft depths of the linear form")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--csv", type=Path, default=Path("kernels_bench.csv"), help="append the rows to this file")
    parser.add_argument("--json", type=Path, help="write the rows and what was left out to this file")
    return parser.parse_args()


def cases(arguments: argparse.Namespace) -> list[Case]:
    found = []
    for kernel in arguments.kernels:
        for vocab_size in arguments.vocab_sizes:
            for rows in arguments.rows:
                more = (arguments.depth, arguments.width) if kernel == "linear" else ()
                found.append(Case(kernel, rows, vocab_size, DTYPES[kernel], *more))
    return found


def _row(case: Case, name: str, cost: Cost, costs: dict[str, Cost], machine: Rates) -> dict[str, Any]:
    floor_ms = max(case.floor_bytes / machine.bandwidth, case.floor_flop / machine.product) * 1e3
    return {
        "kernel": case.kernel,
        "rows": case.rows,
        "vocab_size": case.vocab_size,
        "depth": case.depth,
        "width": case.width,
        "dtype": str(case.dtype).removeprefix("torch."),
        "implementation": name,
        "median_ms": round(cost.median_ms, 3),
        "fastest_ms": round(cost.fastest_ms, 3),
        "slowest_ms": round(cost.slowest_ms, 3),
        "peak_mib": None if cost.peak_mib is None else round(cost.peak_mib, 1),
        "of_eager": round(costs["eager"].median_ms / cost.median_ms, 3) if "eager" in costs else None,
        "floor_bytes": case.floor_bytes,
        "floor_flop": case.floor_flop,
        "over_floor": round(cost.median_ms / floor_ms, 2),
        "bandwidth_gb_s": round(machine.bandwidth / 1e9, 1),
        "product_gflop_s": round(machine.product / 1e9, 1),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    shape = f"[{first['rows']}, {first['vocab_size']}]"
    if first["kernel"] == "linear":
        shape += f", depth {first['depth']}, width {first['width']}"
    passes = "forward" if first["kernel"] == "topk" else "forward and backward"
    print(f"{first['kernel']} {shape} {first['dtype']}, {passes}, {first['threads']} threads")
    shown = ("implementation", "median_ms", "fastest_ms", "slowest_ms", "peak_mib", "of_eager", "over_floor")
    print("  ".join(key.rjust(17 if key == "implementation" else 10) for key in shown))
    for row in sorted(rows, key=lambda row: row["median_ms"]):
        print("  ".join(str(row[key]).rjust(17 if key == "implementation" else 10) for key in shown))
    print(flush=True)


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows; refuse a file that has other columns."""
    header = list(rows[0])
    if path.exists() and path.stat().st_size:
        with open(path, newline="") as file:
            columns = next(csv.reader(file))
        if columns != header:
            sys.exit(f"--csv {path}: got a file with columns {columns}, expected {header}; name another file")
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, header)
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    main()
