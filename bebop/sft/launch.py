"""Starts the training processes and turns their errors into one line.

Training runs in separate processes, even if there is only one: DeepSpeed leaves process groups and threads that engines
started later by the same command must not inherit. torch.distributed.elastic is not used, because its rendezvous
listens on all interfaces of the machine (torch 2.13). The rendezvous file used here needs no port.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

from bebop.errors import SftError
from bebop.processes import ErrorFile, child_environment
from bebop.store.environment import device_name


def error_file(run_dir: Path, rank: int) -> ErrorFile:
    return ErrorFile(run_dir / f"sft_error_{rank}.json")


def launch(job: Path, run_dir: Path, num_processes: int) -> None:
    """Run `python -m bebop.sft.worker JOB` on this machine in num_processes processes, and wait until all have ended.

    If one fails, the others are stopped, and SftError is raised with its error.
    """
    for rank in range(num_processes):
        error_file(run_dir, rank).clear()
    rendezvous = run_dir / f".rendezvous-{uuid.uuid4().hex}"
    common = {"WORLD_SIZE": str(num_processes), "BEBOP_RENDEZVOUS": str(rendezvous), **child_environment(run_dir)}
    if device_name() == "cpu":  # DeepSpeed's Muon would be compiled, but the machine may have no compiler
        common["TORCH_COMPILE_DISABLE"] = "1"
    threads = str(max(1, (os.cpu_count() or 1) // num_processes))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            env = {"OMP_NUM_THREADS": threads, **os.environ, **common, **own}
            processes.append(subprocess.Popen([sys.executable, "-m", "bebop.sft.worker", str(job)], env=env))
        _wait(processes, run_dir)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        rendezvous.unlink(missing_ok=True)


def _wait(processes: list[subprocess.Popen[bytes]], run_dir: Path) -> None:
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise SftError(f"sft process {rank}: {error_file(run_dir, rank).message(code, 'above')}")
        if all(code == 0 for code in codes):
            return
        time.sleep(0.1)
