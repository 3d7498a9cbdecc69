"""Environment of a GRPO run's processes, set here and nowhere else.

Ray's workers and vLLM's engine inherit it from the trainer's process, which `bebop.rl.stage` starts with it. What a
user has set already is left alone, apart from the keys that make the run bebop's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from bebop.engines.vllm_engine.environment import GENERAL, LOG_ENV, cpu_environment
from bebop.processes import RUN_ENV

ENGINE_LOG = "engine.log"


def run_tag(run_dir: Path | str | None = None) -> str:
    """A short name of a run, for sockets and folders that all runs of a machine would share otherwise."""
    return hashlib.sha256(str(run_dir or os.environ.get(RUN_ENV, "")).encode()).hexdigest()[:10]


def run_environment(run_dir: Path, *, on_cpu: bool, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a run's trainer process, on top of `base` (this process's)."""
    env = dict(os.environ if base is None else base)
    wanted = GENERAL | {
        LOG_ENV: str(run_dir / ENGINE_LOG),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(run_dir / "cache"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray replaces 127.0.0.1 by the machine's own address
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_worker_niceness": "0",  # Ray's 15 lets anything else on the machine starve the run
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # idle workers that Ray starts ahead find no use: verl's actors have environments of their own
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if on_cpu:
        wanted |= cpu_environment() | {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "TORCHDYNAMO_DISABLE": "1"}
    env |= {name: value for name, value in wanted.items() if name not in env}
    env |= {"BEBOP_RL": "1", RUN_ENV: str(run_dir), "VERL_USE_EXTERNAL_MODULES": "bebop.rl.verl.plugin"}
    if on_cpu:
        # FSDP, verl's engine of the trainer, is registered under accelerators' names
        env |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
        env.pop("CUDA_VISIBLE_DEVICES", None)
    return env
