"""Environment of a GRPO run's processes, set here and nowhere else.

`bebop grpo` starts verl with it; Ray's workers and vLLM's engine inherit it. A variable that the user has set stays,
except those that make verl load bebop. For your own run of verl, `python -m bebop.rl.verl` prints it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from bebop.engines.vllm_engine.environment import GENERAL, LOG_ENV, cpu_environment
from bebop.processes import RUN_ENV

ENGINE_LOG = "engine.log"


def run_tag(run: Path | str | None = None) -> str:
    """A short name of a run, for sockets and folders that all runs on a machine would share otherwise."""
    return hashlib.sha256(str(run or os.environ.get(RUN_ENV, "")).encode()).hexdigest()[:10]


def verl_environment(run: Path | str, *, on_cpu: bool, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a process that runs verl with bebop, on top of `base` (default: this process's).

    run: marks the run's processes, see bebop.processes.
    """
    env = dict(os.environ if base is None else base)
    wanted = GENERAL | {
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray replaces 127.0.0.1 by the machine's own address
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_worker_niceness": "0",  # with Ray's 15, any other process on the machine starves the run
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # workers that Ray starts in advance are not used: verl's actors have environments of their own
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if on_cpu:
        wanted |= cpu_environment() | {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "TORCHDYNAMO_DISABLE": "1"}
    env |= {name: value for name, value in wanted.items() if name not in env}
    env |= {RUN_ENV: str(run), "VERL_USE_EXTERNAL_MODULES": "bebop.rl.verl.plugin"}
    if on_cpu:
        # FSDP, verl's engine of the trainer, is registered under accelerators' names
        env |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
        env.pop("CUDA_VISIBLE_DEVICES", None)
    return env


def run_environment(run_dir: Path, *, on_cpu: bool, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of `bebop grpo`: verl's, with its files in the run folder, and a token for its own Ray.

    The token keeps other users of the machine out, to whom 127.0.0.1 is open too.
    """
    env = verl_environment(run_dir, on_cpu=on_cpu, base=base)
    wanted = {LOG_ENV: str(run_dir / ENGINE_LOG), "HF_DATASETS_CACHE": str(run_dir / "cache")}
    if not env.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return wanted | env
