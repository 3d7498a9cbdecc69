"""The one correction to Triton's interpreter (TRITON_INTERPRET=1), which runs the kernels on a CPU.

Upstream fault: float32 to bfloat16 cuts the digits off, where devices (and torch) round to nearest even, so that every
bfloat16 gradient came out up to 2^-7 small. Reproduced on KNOWN_VERSIONS; on others the interpreter is left as it came,
with a warning where it still cuts.
"""

from __future__ import annotations

import warnings

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
    if not _cuts(builder):
        return
    if triton.__version__ not in KNOWN_VERSIONS:
        warnings.warn(
            f"Triton {triton.__version__}'s interpreter cuts bfloat16 instead of rounding it; the correction is for "
            f"{', '.join(KNOWN_VERSIONS)} and was left out: gradients in bfloat16 are up to 2^-7 small",
            stacklevel=2,
        )
        return
    cast = builder.cast_impl

    def rounded(self, source, wanted):
        if (source.dtype.scalar, wanted.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, wanted)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    builder.cast_impl = rounded


def _cuts(builder: type) -> bool:
    one = builder.cast_impl(builder, interpreter.TensorHandle(np.float32([JUST_BELOW_ONE]), tl.float32), tl.bfloat16)
    return int(one.data[0]) != 0x3F80
