"""What verl loads in each of its processes (`VERL_USE_EXTERNAL_MODULES`, and the entry-point group `verl.plugins`).

verl loads an entry point without calling it, so importing this module registers; it does so in processes that belong to
a run of bebop alone (`BEBOP_RL=1`), and leaves any other use of verl in this environment as it is.
"""

from __future__ import annotations

import importlib
import os


def register() -> None:
    """Register the CPU platform and MiMo as published, and apply the patches. Safe to call any number of times."""
    importlib.import_module("bebop.mtp.mimo")
    if os.environ.get("VERL_PLATFORM") == "cpu":
        importlib.import_module("bebop.rl.verl.cpu_platform")  # its decorator registers
    from bebop.rl.verl import patches

    patches.apply_all()


if os.environ.get("BEBOP_RL") == "1":
    register()
