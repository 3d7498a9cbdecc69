"""Which implementation runs a call, and what each implementation provides.

| impl      | where it runs                                          |
|-----------|--------------------------------------------------------|
| triton    | CUDA and ROCm GPUs; CPUs too with TRITON_INTERPRET=1   |
| cpu       | CPU tensors, not sharded: loops compiled by numba      |
| reference | anywhere: chunked torch, which the others are tested on |

`auto` takes the first of triton, cpu and reference that can run the call, and logs its choice once per op and device.
An implementation requested by name runs or is refused with the reason. It is never replaced.

The implementation is the module `bebop_kernels.{op}.{impl}`, imported on first use so that the package imports without
triton and numba. Every module provides

    unavailable(device, dtypes) -> str | None       # why it cannot run these tensors, or None

and, by op (shapes as in rows.py; arguments are already checked, except for NaN, +inf and index values; no argument
requires grad):

    overlap.forward(draft_logits, target_logits, temperature, group) -> (alpha [N], saved [N, 5])
    overlap.backward(grad_alpha [N], draft_logits, target_logits, saved, temperature, group) -> grad [N, V]
    linear.sweep(inputs, scale [K, N], want_grad) -> Iterator[Chunk]     # linear/driver.py
    statistics.statistics(draft_logits, target_logits, tokens or None, temperature) -> five or seven [N] float32
    topk.topk(logits, k) -> (values, ids) [N, k]    # no triton: torch.topk serves GPUs

alpha and saved are float32, or float64 if both inputs are. `saved` is private to the implementation; today it holds the
maximum and the sum of both rows, and S. A gradient has the dtype of its input and is rounded once. NaN and +inf in
logits raise a ValueError that names draft_logits or target_logits (draft_hidden or target_hidden in the linear form);
so do indices out of range. `group` is a process group or None. Every rank of a group calls with the same rows and any
number of columns, including 0, and an input that one rank refuses is refused on all.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

import torch

IMPLEMENTATIONS = ("auto", "triton", "cpu", "reference")
MISSING = {("triton", "topk")}
_log = logging.getLogger("bebop_kernels")


def check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: got {impl!r}, expected one of {', '.join(IMPLEMENTATIONS)}")


def choose(impl: str, op: str, device: torch.device, dtypes: tuple[torch.dtype, ...], *, sharded: bool = False) -> str:
    """Name of the implementation for one call. op: overlap, linear, statistics or topk; sharded: over a group.

    Raises ValueError with the reason if the requested implementation cannot run.
    """
    check_impl(impl)
    if impl != "auto":
        reason = unavailable(impl, op, device, dtypes, sharded)
        if reason:
            able = [f"{name!r}" for name in IMPLEMENTATIONS[1:] if not unavailable(name, op, device, dtypes, sharded)]
            raise ValueError(f"impl={impl!r}: {reason}; set impl={' or '.join(able)}")
        return impl
    reasons = {}
    for name in IMPLEMENTATIONS[1:]:
        debug = name == "triton" and device.type != "cuda"  # the interpreter runs only on request
        reasons[name] = "no GPU" if debug else unavailable(name, op, device, dtypes, sharded)
        if not reasons[name]:
            break
    _log_choice(op, device.type, name, "; ".join(f"{k}: {v}" for k, v in reasons.items() if v))
    return name


def unavailable(
    impl: str, op: str, device: torch.device, dtypes: tuple[torch.dtype, ...], sharded: bool = False
) -> str | None:
    """Why an implementation cannot run tensors of these dtypes on a device, or None."""
    if impl == "cpu" and sharded:
        return "takes the whole vocabulary (got a tp_group)"
    if impl == "cpu" and device.type != "cpu":
        return f"needs CPU tensors (got tensors on {device.type})"
    if impl == "triton" and device.type != "cuda" and not interpreted():
        return f"needs a CUDA or ROCm GPU (got tensors on {device.type}), or TRITON_INTERPRET=1 to debug"
    if (impl, op) in MISSING:
        return f"has no {op} kernel"
    reason: str | None = _import_error(impl, op) or module(impl, op).unavailable(device, dtypes)
    return reason


def load(impl: str, op: str, *tensors: torch.Tensor, sharded: bool = False) -> ModuleType:
    """The module that runs an op on these tensors."""
    return module(choose(impl, op, tensors[0].device, tuple(t.dtype for t in tensors), sharded=sharded), op)


def interpreted() -> bool:
    """True if triton interprets its kernels in Python, which works on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def module(impl: str, op: str) -> ModuleType:
    return importlib.import_module(f"bebop_kernels.{op}.{impl}")


@functools.cache
def _import_error(impl: str, op: str) -> str | None:
    try:
        module(impl, op)
    except ImportError as error:
        package = {"cpu": "numba"}.get(impl, impl)
        return f"needs {package} (pip install {package}), which cannot be imported: {error}"
    return None


@functools.cache
def _log_choice(op: str, device: str, name: str, reasons: str) -> None:
    _log.info("%s on %s: impl=%s%s", op, device, name, f" ({reasons})" if reasons else "")
