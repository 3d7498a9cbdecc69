"""One training process: `python -m bebop.sft.worker JOB`, its rank from the environment; bebop.sft.launch starts it."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from bebop.sft.job import Job
from bebop.sft.launch import PARENT_ENV, error_file
from bebop.store.environment import device_name


def main(path: str) -> int:
    """Train as the job file says; an error goes to the rank's error file, for the starting process to tell."""
    _end_with_parent()
    rank = int(os.environ["RANK"])
    job = Job.model_validate_json(Path(path).read_text())
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s", force=True)
    try:
        from bebop.sft.deepspeed import init_process_group
        from bebop.sft.training import Training

        device = device_name()
        init_process_group(device, Path(os.environ["BEBOP_RENDEZVOUS"]), rank, int(os.environ["WORLD_SIZE"]))
        Training(job, f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device).run()
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        line = " ".join(f"{kind}{error}".split())
        error_file(job.run_dir, rank).write_text(f"{traceback.format_exc()}\n{line}\n")
        return 1
    return 0


def _end_with_parent() -> None:
    """Have the kernel end this process when the command that started it dies, however it dies (Linux)."""
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        if os.getppid() != int(os.environ.get(PARENT_ENV, os.getppid())):
            sys.exit("sft worker: the command that started it has ended")


def _end(code: int) -> None:
    """End the process without Python's teardown: a thread of gloo's that still runs then aborts it (torch 2.13), now
    and then, with signal 6 after all work is done."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main(sys.argv[1]))
