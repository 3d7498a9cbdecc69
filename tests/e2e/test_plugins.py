"""A loss from a file outside the package trains heads through the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from bebop.monitor import read_records

pytestmark = pytest.mark.e2e
LOSS = """
from bebop.losses import LOSSES, HeadLoss

LOSSES.register("squared_tv", HeadLoss(of_overlap=lambda alpha: (1 - alpha).square().mean(0)))
"""


def test_a_users_loss_trains_heads(tmp_path: Path, tiny_random: Path):
    (tmp_path / "my_losses.py").write_text(LOSS)
    sums = [f"Calculate {' + '.join(str(a * b % 97) for b in range(2, 4 + a % 9))}\nAnswer: {a}" for a in range(30)]
    parquet.write_table(pa.table({"text": sums}), tmp_path / "sums.parquet")
    words = [
        *("plugins=[./my_losses.py]", "loss.name=squared_tv", "model=hf", f"model.path={tiny_random}"),
        *("model.dtype=float32", "data.source=parquet", "data.path=sums.parquet", "data.num_heldout=6"),
        *("sft.steps=2", "sft.batch_tokens=256", "logger.wandb=disabled", "run_dir=run"),
    ]
    env = {**os.environ, "BEBOP_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "bebop.cli", "sft", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [record["loss_name"] for record in read_records(tmp_path / "run", "sft")] == ["squared_tv"] * 2
