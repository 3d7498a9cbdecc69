"""Which implementation computes a call, and what each must offer.

| impl      | where it runs                                  | files          |
|-----------|------------------------------------------------|----------------|
| triton    | CUDA and ROCm GPUs; TRITON_INTERPRET=1: CPU    | triton_*.py    |
| cpu       | CPU tensors                                    | cpu_*.py       |
| reference | anywhere: chunked torch, the others' judge     | reference_*.py |

`auto` takes the first of triton, cpu and reference that can run the call and logs its choice once per kernel and
device. An implementation that was asked for by name is used or refused with the reason: never replaced.

A module `<impl>_<kernel>` is imported at its first use, so that the package imports without triton. It has

    unavailable(device, dtypes) -> str | None       # why it cannot run tensors of these dtypes there; None: it can

and, by kernel (shapes as in rows.py; arguments are checked but for NaN, +inf and index values; nothing requires grad):

    <impl>_overlap.forward(draft_logits, target_logits, temperature, group) -> (alpha [N], saved [N, 5])
    <impl>_overlap.backward(grad_alpha [N], draft_logits, target_logits, saved, temperature, group) -> grad [N, V]
    <impl>_linear.forward(draft_hidden, target_hidden, weight, target_index, temperature, group, want_row_grad)
        -> (alpha [K, N], row_grad [K, N, D] or None)   # row_grad = d alpha / d draft_hidden, summed over the group
    <impl>_linear.backward(grad_alpha [K, N], draft_hidden, target_hidden, weight, target_index, temperature, group)
        -> (grad_draft_hidden, grad_weight)             # the weight is trained; grad_draft_hidden summed over the group
    <impl>_statistics.statistics(draft_logits, target_logits, tokens or None, temperature) -> five or seven [N] float32
    <impl>_highest.highest(logits, num) -> (values, ids) [N, num]    # not in triton: a GPU takes torch's topk

alpha and saved are float32, float64 where both inputs are. `saved` is the implementation's own: by custom the two
rows' maximum and log-sum, and S. Gradients have the dtype of what they belong to, rounded once. NaN and +inf in logits
raise ValueError naming draft_logits or target_logits (draft_hidden or target_hidden in the linear form), and indices
out of range naming theirs. `group` is a process group or None; every rank of it calls with the same rows and any number
of columns, 0 among them; what is refused on one rank is refused on all.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

import torch

IMPLEMENTATIONS = ("auto", "triton", "cpu", "reference")
ABSENT = {("triton", "highest")}
_log = logging.getLogger("bebop_kernels")


def check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")


def choose(impl: str, kernel: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
    """The implementation's name for one call. kernel: overlap, linear, statistics or highest.

    Raises ValueError with the reason where the one asked for cannot run.
    """
    check_impl(impl)
    if impl != "auto":
        reason = unavailable(impl, kernel, device, dtypes)
        if reason:
            able = [f"{k!r}" for k in IMPLEMENTATIONS[1:] if not unavailable(k, kernel, device, dtypes)]
            raise ValueError(f"impl={impl!r}: {reason}; set impl={' or '.join(able)}")
        return impl
    reasons = {}
    for name in IMPLEMENTATIONS[1:]:
        debug = name == "triton" and device.type != "cuda"  # the interpreter is for those who ask for it
        reasons[name] = "no GPU" if debug else unavailable(name, kernel, device, dtypes)
        if not reasons[name]:
            break
    _announce(kernel, device.type, name, "; ".join(f"{k}: {v}" for k, v in reasons.items() if v))
    return name


def unavailable(impl: str, kernel: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why an implementation cannot run tensors of these dtypes on a device, or None."""
    if impl == "cpu" and device.type != "cpu":
        return f"needs CPU tensors (they are on {device.type})"
    if impl == "triton" and device.type != "cuda" and not interpreted():
        return f"needs a CUDA or ROCm GPU (tensors are on {device.type}), or TRITON_INTERPRET=1 to debug"
    if (impl, kernel) in ABSENT:
        return "has no such kernel"
    try:
        return module(impl, kernel).unavailable(device, dtypes)
    except ImportError as error:
        return f"cannot be imported ({error})"


def load(impl: str, kernel: str, *tensors: torch.Tensor) -> ModuleType:
    """The module that computes a kernel for these tensors."""
    return module(choose(impl, kernel, tensors[0].device, tuple(t.dtype for t in tensors)), kernel)


def interpreted() -> bool:
    """Whether triton runs its kernels in Python, on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def module(impl: str, kernel: str) -> ModuleType:
    return importlib.import_module(f"bebop_kernels.{impl}_{kernel}")


@functools.cache
def _announce(kernel: str, device: str, name: str, reasons: str) -> None:
    _log.info("%s on %s: impl=%s%s", kernel, device, name, f" ({reasons})" if reasons else "")
