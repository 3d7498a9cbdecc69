"""From logits to the sampled distribution: temperature, min-p, top-k and top-p, for draft and target.

The order is vLLM's: temperature, then min-p, then top-k, then top-p on the renormalised rest. Temperature 0 is a point
mass at the largest logit (ties: lowest id). A batch may mix it with other temperatures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop.errors import BadInput

Setting = float | int | Tensor  # one for all, or [B], one per request
_NUCLEUS_SLACK = {torch.float64: 1e-12}  # rounding allowed when a nucleus reaches top_p; other types: 1e-6


class SamplingFilters:
    """The sampling settings of a batch, checked once and applied to any number of logits.

    The constructor raises ValueError for a setting out of range. A call raises it if the number of settings is not the
    logits' B, or if a row of logits has a NaN or no finite value. The message names the argument.
    """

    def __init__(
        self, *, temperature: Setting = 1.0, top_k: Setting = 0, top_p: Setting = 1.0, min_p: Setting = 0.0
    ) -> None:
        self.temperature = _setting("temperature", temperature, low=0.0)
        self._top_k = _setting("top_k", top_k, low=0)
        self._top_p = _setting("top_p", top_p, low=0.0, high=1.0, low_included=False)
        self._min_p = _setting("min_p", min_p, low=0.0, high=1.0)
        self._has_min_p = bool((self._min_p > 0).any())
        self._has_top = bool((self._top_k > 0).any() or (self._top_p < 1).any())

    def __call__(self, logits: Tensor) -> Tensor:
        """[B, ..., V] logits -> probabilities, see apply_sampling."""
        if not logits.is_floating_point() or logits.ndim == 0 or logits.shape[-1] == 0:
            raise BadInput(f"logits: got {logits.dtype} {list(logits.shape)}, expected floats [B, ..., V]")
        for name in ("temperature", "_top_k", "_top_p", "_min_p"):
            shape = getattr(self, name).shape
            if shape and (logits.ndim < 2 or shape[0] != logits.shape[0]):
                got = f"{name.lstrip('_')}: got shape {list(shape)}"
                raise BadInput(f"{got}, expected a number or one per request of the batch")
        logits = logits if logits.dtype == torch.float64 else logits.float()
        top = logits.amax(-1, keepdim=True)  # NaN where the row has one
        if not bool(torch.isfinite(top).all()):
            top = top.squeeze(-1)
            place = [int(i) for i in (~torch.isfinite(top)).nonzero()[0]] if top.ndim else []
            largest = float(top[tuple(place)])
            raise BadInput(
                f"logits: largest value in row {place}: got {largest}, expected a finite one (a row of NaN or -inf?)"
            )
        # the largest logit is subtracted first, so that a small temperature cannot overflow
        temperature = _against(self.temperature, logits)
        greedy = temperature == 0  # in the logits' dtype
        any_greedy = bool(greedy.any())
        divisor = torch.where(greedy, 1.0, temperature) if any_greedy else temperature
        probs = ((logits - top) / divisor).softmax(-1)
        if self._has_min_p:
            kept = probs >= _against(self._min_p, logits) * probs.amax(-1, keepdim=True)
            probs = _renormalised(probs * kept)
        if self._has_top:
            top_k = self._top_k.to(logits.device).reshape(-1, *(1,) * (logits.ndim - 1))
            probs = _top(probs, top_k, _against(self._top_p, logits))
        if any_greedy:
            point = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
            probs = torch.where(greedy, point, probs)
        return probs


def apply_sampling(
    logits: Tensor,
    *,
    temperature: Setting = 1.0,
    top_k: Setting = 0,
    top_p: Setting = 1.0,
    min_p: Setting = 0.0,
) -> Tensor:
    """[B, ..., V] logits -> probabilities of the same shape and dtype (half types: float32).

    top_k 0: off; top_k keeps exactly k ids, ties by lowest id. top_p keeps the fewest ids whose mass reaches it, min_p
    those with at least min_p times the largest probability. Raises ValueError as SamplingFilters does.
    """
    return SamplingFilters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)(logits)


def _top(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ranked = _renormalised(torch.where((top_k == 0) | (rank < top_k), ranked, 0.0))
    before = ranked.double().cumsum(-1) - ranked.double()
    full = (top_p < 1) & (before >= top_p - _NUCLEUS_SLACK.get(probs.dtype, 1e-6)) & (rank > 0)
    return torch.zeros_like(probs).scatter_(-1, order, _renormalised(torch.where(full, 0.0, ranked)))


def _renormalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _setting(name: str, value: Setting, *, low: float, high: float | None = None, low_included: bool = True) -> Tensor:
    """The checked setting, as a number or [B]. Counts are integers."""
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value, dtype=torch.float64)
    if name == "top_k" and bool((value != value.round()).any()):
        raise BadInput(f"top_k: got {value.tolist()}, expected whole numbers")
    if value.ndim > 1:
        raise BadInput(f"{name}: got shape {list(value.shape)}, expected a number or one per request of the batch")
    good = value >= low if low_included else value > low
    good = good & (value <= high) if high is not None else good & torch.isfinite(value)
    if not bool(good.all()):
        got = value.flatten()[(~good).flatten()][0].item()
        bracket = "[" if low_included else "("
        span = f"{bracket}{low}, {'inf)' if high is None else f'{high}]'}"
        raise BadInput(f"{name}: got {got}, expected a value in {span}")
    return value.to(torch.int64) if name == "top_k" else value


def _against(setting: Tensor, logits: Tensor) -> Tensor:
    """The setting on the logits' device, in their dtype, with as many axes as [B, ..., V]."""
    return setting.to(logits.device, logits.dtype).reshape(-1, *(1,) * (logits.ndim - 1))
