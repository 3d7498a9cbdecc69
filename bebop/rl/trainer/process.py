"""The trainer's process of a GRPO run: `python -m bebop.rl.trainer.process <run_dir>`, started by `bebop.rl.stage`.

verl's `run_ppo` starts Ray and is given a task runner that stays in this process: it saves an actor's start-up, and
lets the watchdog end the run from here. verl's and Ray's own output goes to run_dir/grpo.log; the console gets bebop's
lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bebop.rl.environment import PARENT_ENV, run_tag
from bebop.rl.stage import end_processes

START = time.monotonic()
LOG = "grpo.log"
ERROR = "error.json"
LOCK = ".lock"
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
    die_with_parent()
    end_the_rest_after_me(run_dir)
    lock = os.open(run_dir / LOCK, os.O_WRONLY | os.O_CREAT)  # until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print(f"{run_dir}: another process trains in this folder", file=sys.stderr)
        return 1
    console = Console(run_dir / LOG)
    temp_dir = Path(tempfile.gettempdir()) / f"bebop-ray-{run_tag(run_dir)}"
    shutil.rmtree(temp_dir, ignore_errors=True)  # of a run that was killed
    temp_dir.mkdir()
    fail = Failure(run_dir)
    try:
        train(run_dir, temp_dir, console, fail)
        return 0
    except BaseException as error:
        fail.write(error)
        return 1
    finally:
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def train(run_dir: Path, temp_dir: Path, console: Console, fail: Failure) -> None:
    """Compose nothing, decide nothing: run verl on the config that the caller wrote."""
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
    watchdog.Watchdog.on_stuck = staticmethod(fail.leave)
    config = migrate_legacy_reward_impl(config)
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    if config.trainer.device == "cpu":
        engine = config.actor_rollout_ref.rollout.name
        console.phase(f"importing the {engine} engine")
        importlib.import_module(SERVERS[engine])  # ahead of Ray, whose first actor needs it
    console.phase("starting Ray")
    run_ppo(config, task_runner_class=runner.InThisProcess)


class Failure:
    """Leaves the reason of a failed run for the caller, once."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / ERROR

    def write(self, error: BaseException) -> None:
        if self.path.exists():
            return
        text = str(error).strip() or type(error).__name__
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            text = "stopped by a signal; the same command with the same run_dir goes on"
        details = "".join(traceback.format_exception(error))
        print(details, file=sys.stderr, flush=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"type": type(error).__name__, "message": text, "details": details}))
        os.replace(part, self.path)

    def leave(self, error: BaseException) -> None:
        """End this process although its main thread hangs; the caller ends the others."""
        self.write(error)
        os._exit(1)


def end_the_rest_after_me(run_dir: Path) -> None:
    """Fork a process that waits for the end of this one, be it by kill -9, and then ends what the run left behind.

    Ray's own processes watch each other, apart from its agents, which outlive a raylet that was killed.
    """
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)  # `writing` stays open as long as this process lives
        return
    os.setsid()
    os.close(writing)
    os.read(reading, 1)
    end_processes(run_dir, grace_s=ORPHANS_S)
    os._exit(0)


def die_with_parent() -> None:
    """Have the kernel end this process with its parent, should that be killed; in a container that may be process 1."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != int(os.environ.get(PARENT_ENV, os.getppid())):
            sys.exit(1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # verl leaves threads and exit hooks that can hang
