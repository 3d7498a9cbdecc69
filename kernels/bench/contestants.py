"""Who computes alpha and its gradient in the bench: bebop_kernels by implementation, and rivals where they can run.

A contestant is a function of a case's tensors that runs forward and backward once; `highest` has no backward. What
cannot run here is named with its reason and is no failure.

| name              | what it is                                                                                      |
|-------------------|-------------------------------------------------------------------------------------------------|
| eager             | softmax of both, minimum, sum, by autograd; the linear form through logits, one target for all;  |
|                   | of `highest`: a stable sort                                                                     |
| topk              | torch.topk in float32, which leaves open which of equal logits come first (`highest`)            |
| compile           | the same under torch.compile                                                                    |
| speculators       | speculators' eager TV loss (logits form)                                                        |
| speculators_fused | speculators' Triton TV loss (logits form, GPU)                                                  |
| liger             | Liger's fused CE and TVD, of which the TVD is used (logits form, GPU)                           |
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import bebop_kernels
import torch
import torch.nn.functional as F
from bebop_kernels import dispatch
from torch import Tensor

RIVALS = ("eager", "compile", "speculators", "speculators_fused", "liger")
NUM = 128  # of the highest that are searched: the support of a draft tree


@dataclass(frozen=True)
class Case:
    """One shape. kernel: overlap or highest ([rows, V] logits), or linear (depth x rows anchors, [V, width] weight)."""

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

        if self.kernel == "highest":
            return (normal(self.rows, self.vocab_size).mul_(3).to(device, self.dtype),)
        if self.kernel == "overlap":
            target = normal(self.rows, self.vocab_size).mul_(3)
            draft = normal(self.rows, self.vocab_size).mul_(0.5).add_(target)
            made = draft.to(self.dtype), target.to(self.dtype)
        else:
            target = normal(self.rows + self.depth, self.width)
            index = torch.arange(1, self.depth + 1)[:, None] + torch.arange(self.rows)
            draft = target[index] + 0.3 * normal(self.depth, self.rows, self.width)
            weight = normal(self.vocab_size, self.width).mul_(2 * self.width**-0.5)
            made = *(value.to(self.dtype) for value in (draft, target, weight)), index
        made = tuple(value.to(device) for value in made)
        made[0].requires_grad_()
        return made

    @property
    def floor_bytes(self) -> int:
        """Both logits read once, the gradient written once; hidden states and weight read, gradient written.

        Of `highest`: the logits read once.
        """
        size = self.dtype.itemsize
        if self.kernel == "highest":
            return self.rows * self.vocab_size * size
        if self.kernel == "overlap":
            return 3 * self.rows * self.vocab_size * size
        hidden = (2 * self.depth * self.rows + self.rows + self.depth) * self.width
        return (hidden + self.vocab_size * self.width) * size

    @property
    def floor_flop(self) -> int:
        """Products: logits of the K drafts and of the target, and the gradient of the drafts' hidden states."""
        if self.kernel != "linear":
            return 0
        return 2 * self.vocab_size * self.width * (2 * self.depth * self.rows + self.rows + self.depth)


def contestants(case: Case, device: str) -> tuple[dict[str, Callable[..., Tensor]], dict[str, str]]:
    """(name -> alpha of the case's tensors, 1 - alpha by rivals that give that, logits; name -> why it is left out)."""
    function = FUNCTIONS[case.kernel]
    found: dict[str, Callable[..., Tensor]] = {}
    absent: dict[str, str] = {}
    for impl in ("triton", "cpu", "reference"):
        reason = dispatch.unavailable(impl, case.kernel, torch.device(device), (case.dtype,))
        if impl == "triton" and device == "cpu" and reason is None:
            reason = "runs in the interpreter here: no time worth measuring"
        if reason:
            absent[impl] = reason
        else:
            found[impl] = lambda *tensors, impl=impl: function(*tensors, impl=impl)
    if case.kernel == "highest":
        found["eager"] = lambda logits: logits.float().sort(dim=-1, descending=True, stable=True).values[:, :NUM]
        found["topk"] = lambda logits: logits.float().topk(NUM).values
        return found, absent
    eager = eager_overlap if case.kernel == "overlap" else eager_linear
    for name in RIVALS:
        try:
            found[name] = _rival(name, eager, case, device)
        except (ImportError, RuntimeError) as error:
            absent[name] = str(error).splitlines()[0]
    return found, absent


def _highest(logits: Tensor, *, impl: str) -> Tensor:
    return bebop_kernels.highest(logits, NUM, impl=impl)[0]


FUNCTIONS = {
    "overlap": bebop_kernels.tv_overlap,
    "linear": bebop_kernels.linear_tv_overlap,
    "highest": _highest,
}


def eager_overlap(draft: Tensor, target: Tensor) -> Tensor:
    return torch.minimum(draft.float().softmax(-1), target.float().softmax(-1)).sum(-1)


def eager_linear(draft: Tensor, target: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    with torch.no_grad():
        p = F.linear(target, weight).float().softmax(-1)
    return torch.minimum(F.linear(draft, weight).float().softmax(-1), p[index]).sum(-1)


def _rival(name: str, eager: Callable[..., Tensor], case: Case, device: str) -> Callable[..., Tensor]:
    if name == "eager":
        return eager
    if name == "compile":
        if device == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise RuntimeError("torch.compile needs a C++ compiler on CPUs, and none is there")
        return torch.compile(eager, fullgraph=True)
    if case.kernel != "overlap":
        raise RuntimeError("has no form from hidden states that shares the target over depths")
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
