"""Prints shell commands that set the environment for your own run of verl with bebop as a plug-in:

eval "$(python -m bebop.rl.verl)"
python -m verl.trainer.main_ppo 'hydra.searchpath=[pkg://bebop.rl]' '+verl=[base,cpu]' ...
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import torch

from bebop.rl.environment import verl_environment


def exports() -> str:
    env = verl_environment(f"{Path.cwd()}#{os.getpid()}", on_cpu=not torch.cuda.is_available())
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items() if os.environ.get(name) != value]
    return "\n".join(lines + [f"unset {name}" for name in os.environ if name not in env])


if __name__ == "__main__":
    print(exports())
