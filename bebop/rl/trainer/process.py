"""The trainer's process of a GRPO run: `python -m bebop.rl.trainer.process <run_dir>`, started by `bebop.rl.stage`.

verl's `run_ppo` starts Ray and is given a task runner that stays in this process: it saves an actor's start-up, and
lets the watchdog end the run from here. verl's and Ray's own output goes to run_dir/grpo.log; the console gets bebop's
lines.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bebop.processes import ErrorFile, end_marked_after_me, end_with_parent, leave
from bebop.rl.environment import run_tag
from bebop.rl.stage import ERROR, LOG

START = time.monotonic()
SERVERS = {"vllm": "bebop.rl.rollout.vllm_server", "torch": "bebop.rl.rollout.torch_server"}  # by verl's rollout.name
ORPHANS_S = 5.0  # for what is left after the trainer's process to end by itself


class Console:
    """The caller's terminal, kept apart from the output of verl's processes."""

    def __init__(self, log: Path) -> None:
        self.stream = os.fdopen(os.dup(1), "w", buffering=1)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def phase(self, text: str) -> None:
        print(f"[grpo {time.monotonic() - START:5.1f} s] {text}", file=self.stream, flush=True)
        print(f"[grpo {time.monotonic() - START:5.1f} s] {text}", flush=True)


def main(run_dir: Path) -> int:
    end_with_parent()
    # Ray's processes watch each other, except its agents, which outlive a raylet that was killed
    end_marked_after_me(run_dir, grace_s=ORPHANS_S)
    console = Console(run_dir / LOG)
    temp_dir = Path(tempfile.gettempdir()) / f"bebop-ray-{run_tag(run_dir)}"
    shutil.rmtree(temp_dir, ignore_errors=True)  # of a run that was killed
    temp_dir.mkdir()

    def fail(error: BaseException) -> None:
        traceback.print_exception(error)
        ErrorFile(run_dir / ERROR).write(error)

    def fail_now(error: BaseException) -> None:
        """End this process although its main thread hangs; the caller ends the others."""
        fail(error)
        os._exit(1)

    try:
        train(run_dir, temp_dir, console, fail_now)
        return 0
    except BaseException as error:
        fail(error)
        return 1
    finally:
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def train(run_dir: Path, temp_dir: Path, console: Console, fail_now: Callable[[BaseException], None]) -> None:
    """Run verl on the config that the caller wrote."""
    from omegaconf import OmegaConf, open_dict

    config = OmegaConf.load(run_dir / "verl.yaml")
    OmegaConf.set_struct(config, True)
    with open_dict(config):
        config.ray_kwargs.ray_init._temp_dir = str(temp_dir)
    console.phase("importing verl")
    from verl.experimental.reward_loop.reward_loop import migrate_legacy_reward_impl
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from bebop.rl.trainer import runner, sinks, trainer, watchdog

    trainer.Safeguards.phase = staticmethod(console.phase)
    sinks.Sinks.console = console.stream
    watchdog.Watchdog.on_stuck = staticmethod(fail_now)
    config = migrate_legacy_reward_impl(config)
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    if config.trainer.device == "cpu":
        engine = config.actor_rollout_ref.rollout.name
        console.phase(f"importing the {engine} engine")
        importlib.import_module(SERVERS[engine])  # ahead of Ray, whose first actor needs it
    console.phase("starting Ray")
    run_ppo(config, task_runner_class=runner.InThisProcess)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    leave(code)  # verl leaves threads and exit hooks that can hang
