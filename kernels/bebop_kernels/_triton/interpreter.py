"""A correction to Triton's interpreter (TRITON_INTERPRET=1), which runs the kernels on a CPU.

Upstream fault: the interpreter truncates float32 to bfloat16, while devices and torch round to nearest even, so every
bfloat16 gradient was too small by up to 2^-7. The fault is confirmed in KNOWN_VERSIONS. Other versions are not changed;
there is a warning if they truncate too.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

KNOWN_VERSIONS = ("3.7.1", "3.9.0")
JUST_BELOW_ONE = 1 - 2**-12  # 1.0 in bfloat16


def round_bfloat16() -> None:
    """Make the interpreter's conversions to bfloat16 round to nearest even."""
    builder = interpreter.InterpreterBuilder
    if not _truncates(builder):
        return
    if triton.__version__ not in KNOWN_VERSIONS:
        warnings.warn(
            f"the interpreter of Triton {triton.__version__} truncates to bfloat16; the correction is only for "
            f"{', '.join(KNOWN_VERSIONS)}, so bfloat16 gradients are too small by up to 2^-7",
            stacklevel=2,
        )
        return
    cast = builder.cast_impl

    def rounded(self: Any, source: Any, wanted: Any) -> Any:
        if (source.dtype.scalar, wanted.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, wanted)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    builder.cast_impl = rounded


def _truncates(builder: Any) -> bool:
    one = builder.cast_impl(
        builder, interpreter.TensorHandle(np.array([JUST_BELOW_ONE], np.float32), tl.float32), tl.bfloat16
    )
    return int(one.data[0]) != 0x3F80
