"""python kernels/tools/aot.py [fp32 bf16 fp16]: compile every Triton kernel for sm_90 (H100, H200) and gfx942 (MI300).

Needs no GPU. Prints the registers and spills that the vendors' tools report.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from bebop_kernels._triton import launch
from bebop_kernels._triton import rows as kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
LOGITS = ("fp32", "bf16", "fp16")
_TYPES = {
    **dict.fromkeys(("index",), "*i64"),
    **dict.fromkeys(("best",), "*i32"),
    **dict.fromkeys(("sums", "parts", "draft_sums", "target_sums", "over_mass", "row_scale"), "*fp32"),
    **dict.fromkeys(("scale", "scale_low", "out_scale"), "fp32"),
    **dict.fromkeys(("draft_stride", "target_stride", "first_stride", "second_stride", "out_stride"), "i64"),
}


class Variant(NamedTuple):
    """One kernel as it is launched, and the type of its logits."""

    kernel: str
    logits: str
    constants: dict[str, Any]
    warps: int

    def __str__(self) -> str:
        flags = " ".join(f"{k.lower()}={v}" for k, v in self.constants.items())
        return f"{self.kernel} {self.logits} {flags} warps={self.warps}"


class Resources(NamedTuple):
    registers: int
    spilled_bytes: int


def variants(logits: tuple[str, ...] = LOGITS) -> Iterator[Variant]:
    """Every kernel and tile that bebop_kernels can launch."""
    yield Variant("merge_sums", "fp32", {"ROWS": launch.MERGE_ROWS}, 4)
    for dtype, tile in itertools.product(logits, launch.TILES):
        for both in (True, False):
            yield Variant("row_sums", dtype, {"BOTH": both, "COLUMNS": tile.columns}, tile.warps)
        for indexed in (True, False):
            yield Variant("row_overlap", dtype, {"INDEXED": indexed, "COLUMNS": tile.columns}, tile.warps)
        for indexed, scaled in ((False, True), (True, False), (True, True)):
            constants = {"INDEXED": indexed, "SCALED": scaled, "COLUMNS": tile.columns}
            yield Variant("row_gradient", dtype, constants, tile.warps)
        yield Variant("row_statistics", dtype, {"COLUMNS": tile.columns}, tile.warps)


def compile_for(target: str, variant: Variant) -> Resources:
    """Compile a variant for rows that are 16-byte aligned, as in a vocabulary that is a multiple of 16."""
    function = getattr(kernels, variant.kernel)
    signature, divisible = {}, {}
    for place, name in enumerate(function.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        logits = name in ("draft", "target", "first", "second") or (name == "out" and variant.kernel == "row_gradient")
        signature[name] = f"*{variant.logits}" if logits else _TYPES.get(name, "*fp32" if name == "out" else "i32")
        if signature[name].startswith("*") or name in ("vocab_size", "span") or signature[name] == "i64":
            divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=variant.constants, attrs=divisible)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": variant.warps})
    return _amd(compiled.asm["amdgcn"]) if target.startswith("gfx") else _nvidia(compiled.asm["cubin"])


def _nvidia(cubin: bytes) -> Resources:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    # These kernels use the stack only for spilled registers.
    return Resources(*(int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK")))


def _amd(assembly: str) -> Resources:
    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", assembly)[1])

    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return Resources(number("vgpr_count"), max(4 * spills, number("private_segment_fixed_size")))


if __name__ == "__main__":
    for name, variant in itertools.product(TARGETS, variants(tuple(sys.argv[1:]) or LOGITS)):
        resources = compile_for(name, variant)
        print(name, variant, "registers", resources.registers, "spilled", resources.spilled_bytes, flush=True)
