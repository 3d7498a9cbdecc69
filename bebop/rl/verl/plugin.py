"""The module that verl imports in each of its processes: `VERL_USE_EXTERNAL_MODULES=bebop.rl.verl.plugin`.

It registers bebop's trainers (`trainer.v1.trainer_mode=bebop_sync` or `bebop_colocate_async`), rollout servers,
advantage and CPU platform, and applies the patches. A verl that does not name it is left as it is.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os


def register() -> None:
    """Register everything. Safe to call any number of times."""
    importlib.import_module("bebop.mtp.mimo")
    if os.environ.get("VERL_PLATFORM") == "cpu":
        importlib.import_module("bebop.rl.verl.cpu_platform")  # its decorator registers
    from bebop.rl.verl import patches

    patches.apply_all()
    if multiprocessing.parent_process() is None:  # vLLM's own processes need no trainer
        importlib.import_module("bebop.rl.trainer.trainer")


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    register()
