"""The process of `bebop grpo` that runs verl: `python -m bebop.rl.trainer.process <run_dir>`.

It is started by `bebop.rl.stage`, and does what verl's own `main_ppo` does, with the config in run_dir/verl.yaml. The
trainer itself runs in a Ray actor. Besides, this process ends with its parent, leaves no other process of the run, and
writes its error to a file.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import traceback
from pathlib import Path

from bebop.processes import ErrorFile, end_marked_after_me, end_with_parent, leave, socket_folder
from bebop.rl.environment import run_tag
from bebop.rl.stage import ERROR
from bebop.rl.trainer.sinks import Console

RAY_ROOM = 85  # bytes of "/bebop-ray-<tag>/session_<time>_<process id>/sockets/plasma_store"
ORPHANS_S = 5.0  # time for the run's other processes to end by themselves after this one


def main(run_dir: Path) -> int:
    end_with_parent()
    # Ray's processes watch each other, except its agents, which outlive a raylet that was killed
    end_marked_after_me(run_dir, grace_s=ORPHANS_S)
    temp_dir = socket_folder(RAY_ROOM) / f"bebop-ray-{run_tag(run_dir)}"
    shutil.rmtree(temp_dir, ignore_errors=True)  # left by a run that was killed
    temp_dir.mkdir()
    try:
        train(run_dir, temp_dir)
        return 0
    except BaseException as error:
        traceback.print_exception(error)
        ErrorFile(run_dir / ERROR).write(error)
        return 1
    finally:
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def train(run_dir: Path, temp_dir: Path) -> None:
    """Run verl on the config that the caller wrote."""
    from omegaconf import OmegaConf, open_dict

    config = OmegaConf.load(run_dir / "verl.yaml")
    OmegaConf.set_struct(config, True)
    with open_dict(config):
        config.ray_kwargs.ray_init._temp_dir = str(temp_dir)
    console = Console(run_dir)
    console.say("importing verl")
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    console.say("starting Ray")
    run_ppo(config, task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    leave(code)  # verl leaves threads and exit hooks that can hang
