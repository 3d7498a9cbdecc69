"""Environment variables of the engine's processes, set only here.

A spawned process reads its environment once, at its start. So the values are set only while the engine starts, and the
caller's environment is restored afterwards. A value that the user has set is not changed.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bebop.engines.vllm_engine.fixes import PLAIN_WEIGHTS_ENV
from bebop.processes import end_with_parent, socket_folder

PARENT_ENV = "BEBOP_ENGINE_PARENT"  # process id of the engine's owner
LOG_ENV = "BEBOP_ENGINE_LOG"  # file to which the engine process writes its output
V2_RUNNER_ENV = "VLLM_USE_V2_MODEL_RUNNER"
GENERAL = {
    # The same runner everywhere, the one that GRPO needs: verl 0.9.1 does not find the V2 runner's drafter and would
    # never sync it. V2 also has another sampler, so results of doctor, eval and bench on it would not hold for RL.
    V2_RUNNER_ENV: "0",
    "HF_HUB_OFFLINE": "1",  # policies are directories on disk
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_RPC_BASE_PATH": str(socket_folder(40)),  # its sockets have a UUID as their name
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about defaults that bebop sets on purpose
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}
CPU = {
    PLAIN_WEIGHTS_ENV: "1",  # weights are updated in place
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # another stage may run at the same time
    "TORCH_COMPILE_DISABLE": "1",
    # one process less to start: the worker runs in the engine core, whose OpenMP variables are set here
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def missing(wanted: dict[str, str]) -> dict[str, str]:
    """The variables in `wanted` that the user has not set."""
    return {name: value for name, value in wanted.items() if name not in os.environ}


def cpu_environment() -> dict[str, str]:
    """Variables of an engine process on a CPU, with libiomp5 preloaded if it is installed."""
    library = intel_openmp()
    return CPU | ({"LD_PRELOAD": str(library)} if library else {})


def intel_openmp() -> Path | None:
    """libiomp5.so of this Python environment, if it can be preloaded: vLLM's CPU drafting is slow without it."""
    found = Path(sys.prefix) / "lib" / "libiomp5.so"
    # LD_PRELOAD separates by spaces and colons, and knows no quotes
    return found if found.exists() and not set(" \t:") & set(str(found)) else None


def enter_engine_process() -> None:
    """In the process that bebop's engine spawned: end with the parent, and write stdout and stderr to the log.

    vLLM 0.31.0's engine core outlives a parent that was killed. Does nothing in any other process.
    """
    parent = os.environ.get(PARENT_ENV)
    if multiprocessing.parent_process() is None or parent is None:
        return
    if os.getppid() in (int(parent), 1):  # 1: the engine's owner, in a container, or who adopted this process
        end_with_parent(int(parent))
    if path := os.environ.get(LOG_ENV):
        log = os.open(path, os.O_WRONLY | os.O_APPEND)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def last_error(log: Path) -> str | None:
    """The exception that ended an engine process, from its log: the last line such as `ValueError: text`."""
    if not log.is_file():
        return None
    found = re.findall(
        r"(?:^|\] |\s)(\w+(?:\.\w+)*(?:Error|Exception): .+)$", log.read_text(errors="replace"), re.MULTILINE
    )
    return found[-1].strip() if found else None


@contextmanager
def applied(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables during the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
