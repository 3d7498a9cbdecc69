"""One training process: `python -m bebop.sft.worker JOB`, with its rank in the environment. See bebop.sft.launch."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from bebop.processes import end_with_parent, leave
from bebop.sft.job import Job
from bebop.sft.launch import error_file
from bebop.store.environment import device_name


def main(path: str) -> int:
    """Train as the job file says. An error goes to the rank's error file, which the starting process reads."""
    end_with_parent()
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
        error_file(job.run_dir, rank).write(error)
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1]))
