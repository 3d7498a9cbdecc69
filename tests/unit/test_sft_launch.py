"""Training processes wait for each other as long as it takes, and not at all for one that has died."""

import sys
import time
from pathlib import Path

import pytest

from bebop.errors import SftError
from bebop.sft.launch import launch

WORKER = """
import os, signal, time
from pathlib import Path
import torch
from bebop.sft.deepspeed import init_process_group

rank = int(os.environ["RANK"])
init_process_group("cpu", Path(os.environ["BEBOP_RENDEZVOUS"]), rank, int(os.environ["WORLD_SIZE"]))
Path(__file__).with_name(f"pid{rank}").write_text(str(os.getpid()))
torch.distributed.barrier()
if rank:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    torch.distributed.barrier()
finally:
    time.sleep(3600)  # as one that does not notice
"""


def test_a_killed_process_ends_the_others_at_once(tmp_path, monkeypatch, repo):
    """Rank 1 is gone while rank 0 waits for it; the launcher says which it was and leaves nothing running."""
    (tmp_path / "worker.py").write_text(WORKER)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/worker.py\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(repo))
    with pytest.raises(SftError, match="sft process 1: killed by SIGKILL"):
        launch(tmp_path / "job.json", tmp_path, 2)
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]
    assert time.time() - pids[1].stat().st_mtime < 30
    assert not any(Path(f"/proc/{pid.read_text()}").exists() for pid in pids)
