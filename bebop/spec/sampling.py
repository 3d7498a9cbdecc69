"""From logits to the distribution that is sampled: temperature, min-p, top-k, top-p, for draft and target alike.

The order is vLLM's: temperature first, min-p on its result, then top-k, then top-p on what top-k left, renormalised.
Temperature 0 is a point mass at the largest logit (ties: lowest id) and may stand beside others in a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop.errors import BadInput

Setting = float | int | Tensor  # one for all, or [B], one per request
_NUCLEUS_SLACK = {torch.float64: 1e-12}  # a nucleus that reaches top_p up to rounding is full; else 1e-6


class Warp:
    """`warp` with its settings looked at once: call it with logits as often as needed.

    Raises ValueError as `warp` does: out of range when made, a count other than the logits' B when called.
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
        if not logits.is_floating_point() or logits.ndim == 0 or logits.shape[-1] == 0:
            raise BadInput(f"logits: {logits.dtype} {list(logits.shape)} came, expected floats [B, ..., V]")
        for name in ("temperature", "_top_k", "_top_p", "_min_p"):
            shape = getattr(self, name).shape
            if shape and (logits.ndim < 2 or shape[0] != logits.shape[0]):
                came = f"{name.lstrip('_')}: shape {list(shape)} came"
                raise BadInput(f"{came}, expected a number or one per request of the batch")
        logits = logits if logits.dtype == torch.float64 else logits.float()
        top = logits.amax(-1, keepdim=True)  # NaN where the row has one
        if not bool(torch.isfinite(top).all()):
            top = top.squeeze(-1)
            place = [int(i) for i in (~torch.isfinite(top)).nonzero()[0]] if top.ndim else []
            came = float(top[tuple(place)])
            raise BadInput(
                f"logits: largest value {came} in row {place}, expected a finite one (a row of NaN or -inf?)"
            )
        # the largest logit is taken off first, so that a small temperature can't overflow
        temperature = _against(self.temperature, logits)
        greedy = temperature == 0  # as the logits' type has it
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


def warp(
    logits: Tensor,
    *,
    temperature: Setting = 1.0,
    top_k: Setting = 0,
    top_p: Setting = 1.0,
    min_p: Setting = 0.0,
) -> Tensor:
    """[B, ..., V] logits -> probabilities of the same shape and dtype (half types: float32).

    top_k 0: off; top_k keeps exactly k ids, ties by lowest id. top_p keeps the fewest ids whose mass reaches it, min_p
    those with at least min_p times the largest probability.
    Raises ValueError naming the argument: settings out of range or not [B], rows with NaN or without a finite logit.
    """
    return Warp(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)(logits)


def token_logprobs(logits: Tensor, tokens: Tensor, **settings: Setting) -> Tensor:
    """Log-probability of emitted tokens under the distribution that sampled them, speculation or not.

    logits [B, L, V]: row i is of the token at place i. tokens long [B, L], -1 = none: NaN there, so that no missing
    value passes for a certain one. settings as of warp; at temperature 0, where the sampled law is a point mass, the
    log-probability at temperature 1 without filters is given, as vLLM does. -inf for a token that was filtered out.
    """
    if tokens.shape != logits.shape[:-1]:
        raise BadInput(f"tokens: {list(tokens.shape)} came, expected [B, L] = {list(logits.shape[:-1])}")
    if tokens.numel() and int(tokens.max()) >= logits.shape[-1]:
        raise BadInput(f"tokens: {int(tokens.max())} came, expected ids in [0, {logits.shape[-1]}), or -1 for none")
    at = tokens.clamp(min=0).unsqueeze(-1)
    plain = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1).gather(-1, at).squeeze(-1)
    settled = Warp(**settings)
    greedy = (_against(settled.temperature, plain.unsqueeze(-1)) == 0).squeeze(-1)
    found = torch.where(greedy, plain, settled(logits).gather(-1, at).squeeze(-1).log())
    return torch.where(tokens >= 0, found, torch.nan)


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
    """The setting as a number or [B], checked; counts as integers."""
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value, dtype=torch.float64)
    if name == "top_k" and bool((value != value.round()).any()):
        raise BadInput(f"top_k: {value.tolist()} came, expected whole numbers")
    if value.ndim > 1:
        raise BadInput(f"{name}: shape {list(value.shape)} came, expected a number or one per request of the batch")
    good = value >= low if low_included else value > low
    good = good & (value <= high) if high is not None else good & torch.isfinite(value)
    if not bool(good.all()):
        came = value.flatten()[(~good).flatten()][0].item()
        bracket = "[" if low_included else "("
        span = f"{bracket}{low}, {'inf)' if high is None else f'{high}]'}"
        raise BadInput(f"{name}: {came} came, expected a value in {span}")
    return value.to(torch.int64) if name == "top_k" else value


def _against(setting: Tensor, logits: Tensor) -> Tensor:
    """The setting on the logits' device, in their dtype, of the rank of [B, ..., V]."""
    return setting.to(logits.device, logits.dtype).reshape(-1, *(1,) * (logits.ndim - 1))
