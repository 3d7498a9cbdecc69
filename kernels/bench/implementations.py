"""The implementations that the bench compares: those of bebop_kernels, and baselines.

An implementation is a function of a case's tensors. The bench runs it forward, and backward except for topk. One that
cannot run here is reported with its reason; this is not an error.

| baseline          | what it computes                                                                        |
|-------------------|-----------------------------------------------------------------------------------------|
| eager             | softmax of both, minimum, sum, by autograd; the linear form from logits, with the       |
|                   | target's shared by all depths; topk by a stable sort                                    |
| torch_topk        | torch.topk in float32, without an order among equal logits (topk)                       |
| compile           | eager under torch.compile                                                               |
| speculators       | the eager TV loss of speculators (overlap)                                              |
| speculators_fused | the Triton TV loss of speculators (overlap, GPU)                                        |
| liger             | the TVD of Liger's fused CE and TVD (overlap, GPU)                                      |
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import bebop_kernels
import torch
import torch.nn.functional as F
from bebop_kernels import dispatch
from bebop_kernels.topk import naive
from torch import Tensor

BASELINES = ("eager", "compile", "speculators", "speculators_fused", "liger")
K = 128  # of topk: the support of a draft tree


@dataclass(frozen=True)
class Case:
    """One shape. kernel: overlap or topk ([rows, V] logits), or linear (depth x rows anchors, [V, width] weight)."""

    kernel: str
    rows: int
    vocab_size: int
    dtype: torch.dtype
    depth: int = 1
    width: int = 0

    def tensors(self, device: str) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        if self.kernel == "topk":
            return (normal(self.rows, self.vocab_size).mul_(3).to(device, self.dtype),)
        if self.kernel == "overlap":
            target = normal(self.rows, self.vocab_size).mul_(3)
            draft = normal(self.rows, self.vocab_size).mul_(0.5).add_(target)
            tensors = [draft.to(self.dtype), target.to(self.dtype)]
        else:
            target = normal(self.rows + self.depth, self.width)
            index = torch.arange(1, self.depth + 1)[:, None] + torch.arange(self.rows)
            draft = target[index] + 0.3 * normal(self.depth, self.rows, self.width)
            weight = normal(self.vocab_size, self.width).mul_(2 * self.width**-0.5)
            tensors = [*(value.to(self.dtype) for value in (draft, target, weight)), index]
        tensors = [value.to(device) for value in tensors]
        tensors[0].requires_grad_()
        return tuple(tensors)

    @property
    def floor_bytes(self) -> int:
        """overlap: both logits read, the gradient written. linear: hidden states and weight read, gradients written.
        topk: logits read. Each once.
        """
        size = self.dtype.itemsize
        if self.kernel == "topk":
            return self.rows * self.vocab_size * size
        if self.kernel == "overlap":
            return 3 * self.rows * self.vocab_size * size
        hidden = (2 * self.depth * self.rows + self.rows + self.depth) * self.width
        return (hidden + self.vocab_size * self.width) * size

    @property
    def floor_flop(self) -> int:
        """Matrix products: logits of the K depths and of the target, and the gradient of the draft's hidden states."""
        if self.kernel != "linear":
            return 0
        return 2 * self.vocab_size * self.width * (2 * self.depth * self.rows + self.rows + self.depth)


def implementations(case: Case, device: str) -> tuple[dict[str, Callable[..., Tensor]], dict[str, str]]:
    """(name -> function of the case's tensors that returns alpha, 1 - alpha or values; name -> why it cannot run)."""
    function = FUNCTIONS[case.kernel]
    available: dict[str, Callable[..., Tensor]] = {}
    left_out: dict[str, str] = {}
    for impl in ("triton", "cpu", "reference"):
        reason = dispatch.unavailable(impl, case.kernel, torch.device(device), (case.dtype,))
        if impl == "triton" and device == "cpu" and reason is None:
            reason = "runs in the interpreter here; its time says nothing"
        if reason:
            left_out[impl] = reason
        else:
            available[impl] = lambda *tensors, impl=impl: function(*tensors, impl=impl)
    if case.kernel == "topk":
        available["eager"] = lambda logits: naive.topk(logits.float(), K)[0]
        available["torch_topk"] = lambda logits: logits.float().topk(K).values
        return available, left_out
    eager = eager_overlap if case.kernel == "overlap" else eager_linear
    for name in BASELINES:
        try:
            available[name] = _baseline(name, eager, case, device)
        except (ImportError, RuntimeError) as error:
            left_out[name] = str(error).splitlines()[0]
    return available, left_out


def _topk(logits: Tensor, *, impl: str) -> Tensor:
    return bebop_kernels.topk(logits, K, impl=impl)[0]


FUNCTIONS = {
    "overlap": bebop_kernels.tv_overlap,
    "linear": bebop_kernels.linear_tv_overlap,
    "topk": _topk,
}


def eager_overlap(draft: Tensor, target: Tensor) -> Tensor:
    return torch.minimum(draft.float().softmax(-1), target.float().softmax(-1)).sum(-1)


def eager_linear(draft: Tensor, target: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    with torch.no_grad():
        p = F.linear(target, weight).float().softmax(-1)
    return torch.minimum(F.linear(draft, weight).float().softmax(-1), p[index]).sum(-1)


def _baseline(name: str, eager: Callable[..., Tensor], case: Case, device: str) -> Callable[..., Tensor]:
    if name == "eager":
        return eager
    if name == "compile":
        if device == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise RuntimeError("torch.compile needs a C++ compiler on CPUs, and found none")
        return torch.compile(eager, fullgraph=True)
    if case.kernel != "overlap":
        raise RuntimeError("has no linear form that shares the target over depths")
    if name != "speculators" and device == "cpu":
        raise RuntimeError("runs on a GPU only")
    if name == "speculators":
        from speculators.losses.eager import tv_loss

        return lambda draft, target: tv_loss(draft[None], target[None])
    if name == "speculators_fused":
        from speculators.losses.fused import fused_tv_loss

        return lambda draft, target: fused_tv_loss(draft[None], target[None])
    from liger_kernel.transformers import LigerFusedCETVDLoss

    labels = torch.zeros(case.rows, dtype=torch.long, device=device)
    return lambda draft, target: LigerFusedCETVDLoss()(draft, target, labels)[1]
