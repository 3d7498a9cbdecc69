"""A user's own members, from a file outside the package, at work through the command line."""

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


FAMILY = """
from dataclasses import replace

from bebop.mtp.families import DECODER, FAMILIES

FAMILIES.register("granite", replace(DECODER, name="granite", classes={"granite": "Granite"}))
"""


def test_a_users_family_trains_fresh_heads(tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from bebop.data.tokenizer import token_ids, write_tiny_tokenizer

    source = tmp_path / "granite"
    size = write_tiny_tokenizer(source)
    end_id, pad_id = token_ids(source)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": size, "eos_token_id": end_id, "pad_token_id": pad_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("granite", **sizes)).save_pretrained(source)
    (tmp_path / "my_family.py").write_text(FAMILY)
    sums = [f"Calculate {a} + {a * 7 % 13}\nAnswer: {a + a * 7 % 13}" for a in range(30)]
    parquet.write_table(pa.table({"text": sums}), tmp_path / "sums.parquet")
    words = [
        *("model=hf", f"model.path={source}", "model.dtype=float32", "data.source=parquet", "data.path=sums.parquet"),
        *("data.num_heldout=6", "sft.steps=2", "sft.batch_tokens=256", "logger.wandb=disabled", "run_dir=run"),
    ]
    env = {**os.environ, "BEBOP_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "bebop.cli", "sft", *words]
    without = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert without.returncode != 0 and "FAMILIES" in without.stderr
    command.append("plugins=[./my_family.py]")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    from safetensors import safe_open

    with safe_open(tmp_path / "run" / "checkpoint" / "model.safetensors", "pt") as written:
        assert "mtp.fc.weight" in written.keys()  # noqa: SIM118
