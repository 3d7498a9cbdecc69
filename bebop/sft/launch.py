"""Starts the training processes and turns what goes wrong in them into one line.

Training runs in processes of its own, also when there is one only: DeepSpeed leaves process groups and threads behind,
and engines that start later in the same command must not inherit them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

from bebop.errors import SftError
from bebop.store.environment import device_name

PARENT_ENV = "BEBOP_SFT_PARENT"  # process id of the command that started the workers


def error_file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"sft_error_{rank}.txt"


def launch(job: Path, run_dir: Path, num_processes: int) -> None:
    """Run `python -m bebop.sft.worker JOB` on this machine, num_processes times, until all have ended.

    Raises SftError with the first failing process's error; the others are stopped.
    """
    for rank in range(num_processes):
        error_file(run_dir, rank).unlink(missing_ok=True)
    rendezvous = run_dir / f".rendezvous-{uuid.uuid4().hex}"
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_processes):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "BEBOP_RENDEZVOUS": rendezvous}
            own[PARENT_ENV] = os.getpid()
            env = {"OMP_NUM_THREADS": str(threads), **os.environ, **{key: str(value) for key, value in own.items()}}
            if device_name() == "cpu":  # DeepSpeed's Muon would be compiled, for which a bare machine has no compiler
                env["TORCH_COMPILE_DISABLE"] = "1"
            command = [sys.executable, "-m", "bebop.sft.worker", str(job)]
            processes.append(subprocess.Popen(command, env=env))
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
                raise SftError(_one_line(run_dir, rank, code))
        if all(code == 0 for code in codes):
            return
        time.sleep(0.1)


def _one_line(run_dir: Path, rank: int, code: int) -> str:
    file = error_file(run_dir, rank)
    if file.exists():
        text = file.read_text().strip()
        return f"sft process {rank}: {text.splitlines()[-1]} (traceback in {file})"
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"sft process {rank}: {how}, no error of its own; its output is above"
