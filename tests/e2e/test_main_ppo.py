"""verl's own `main_ppo` with bebop as a plug-in: speculation, records and safeguards without bebop's command line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from grpo_runs import REWARD, START_UP_S, check_served, no_process_left

from bebop.config import Task
from bebop.data.prompts import make_prompts
from bebop.monitor import read_records, read_steps
from bebop.rl.prompts import write_parquet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_users_verl_run_speculates_and_is_recorded(tiny_random: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    prompts = write_parquet(make_prompts([Task(name="chain_sum")], 12, 0, "rl"), tmp_path / "prompts.parquet")
    words = [
        *("hydra.searchpath=[pkg://bebop.rl]", "+verl=[base,cpu]", f"hydra.run.dir={tmp_path}"),
        *(f"bebop.run_dir={run_dir}", "bebop.wandb=disabled", f"reward.custom_reward_function.path={REWARD}"),
        *(f"actor_rollout_ref.model.path={tiny_random}", f"data.train_files={prompts}", f"data.val_files={prompts}"),
        *("data.train_batch_size=4", "data.max_prompt_length=96", "data.max_response_length=48"),
        *("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.max_model_len=160"),
        *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "actor_rollout_ref.actor.optim.lr=1e-3"),
        *("trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.logger=[console]"),
    ]
    main = f'eval "$({sys.executable} -m bebop.rl.verl)"; exec env BEBOP_RUN={run_dir} {sys.executable}'
    command = f"{main} -m verl.trainer.main_ppo {shlex.join(words)}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=START_UP_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    records = read_steps(run_dir)
    check_served(records, 3)  # acceptance; the engine's heads are the trainer's after each sync
    for record in records:
        assert record.entropy_nats > 0 and record.reward_mean is not None and record.acceptance_rule == "rejection"
        assert record.extra["rewards/failed_share"] == 0  # the reward function ran in the box
    assert not read_records(run_dir, "error") and not (run_dir / "error.json").exists()
    assert no_process_left(run_dir, within_s=20)
