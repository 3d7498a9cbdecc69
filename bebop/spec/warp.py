"""From logits to the distribution that is sampled: temperature, min-p, top-k, top-p, for draft and target alike.

The order is vLLM's: temperature first, min-p on its result, then top-k, then top-p on what top-k left, renormalised.
Temperature 0 is a point mass at the largest logit (ties: lowest id) and may stand beside others in a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

Setting = float | int | Tensor  # one for all, or [B], one per request
_NUCLEUS_SLACK = {torch.float64: 1e-12}  # a nucleus that reaches top_p up to rounding is full; else 1e-6


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
    if not logits.is_floating_point() or logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits: {logits.dtype} {list(logits.shape)} came, expected floats [B, ..., V]")
    top = logits.amax(-1)  # NaN where the row has one
    if not bool(torch.isfinite(top).all()):
        place = [int(i) for i in (~torch.isfinite(top)).nonzero()[0]] if top.ndim else []
        came = float(top[tuple(place)])
        raise ValueError(f"logits: largest value {came} in row {place}, expected a finite one (a row of NaN or -inf?)")
    temperature = _setting("temperature", temperature, logits, low=0.0)
    top_k = _setting("top_k", top_k, logits, low=0)
    top_p = _setting("top_p", top_p, logits, low=0.0, high=1.0, low_included=False)
    min_p = _setting("min_p", min_p, logits, low=0.0, high=1.0)

    logits = logits if logits.dtype == torch.float64 else logits.float()
    greedy = temperature == 0
    # the largest logit is taken off first, so that a small temperature can't overflow
    shifted = logits - logits.amax(-1, keepdim=True)
    probs = (shifted / torch.where(greedy, 1.0, temperature)).softmax(-1)
    if bool((min_p > 0).any()):
        kept = probs >= min_p * probs.amax(-1, keepdim=True)
        probs = _renormalised(probs * kept)
    if bool((top_k > 0).any() or (top_p < 1).any()):
        probs = _top(probs, top_k, top_p)
    if bool(greedy.any()):
        point = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(greedy, point, probs)
    return probs


def token_logprobs(logits: Tensor, tokens: Tensor, **settings: Setting) -> Tensor:
    """Log-probability of emitted tokens under the distribution that sampled them, speculation or not.

    logits [B, L, V]: row i is of the token at place i. tokens long [B, L], -1 = none: NaN there, so that no missing
    value passes for a certain one. settings as of warp; at temperature 0, where the sampled law is a point mass, the
    log-probability at temperature 1 without filters is given, as vLLM does. -inf for a token that was filtered out.
    """
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(f"tokens: {list(tokens.shape)} came, expected [B, L] = {list(logits.shape[:-1])}")
    at = tokens.clamp(min=0).unsqueeze(-1)
    plain = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1).gather(-1, at).squeeze(-1)
    greedy = _setting("temperature", settings.get("temperature", 1.0), logits, low=0.0).squeeze(-1) == 0
    found = torch.where(greedy, plain, warp(logits, **settings).gather(-1, at).squeeze(-1).log())
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


def _setting(
    name: str, value: Setting, logits: Tensor, *, low: float, high: float | None = None, low_included: bool = True
) -> Tensor:
    """The setting against [B, ..., V], checked."""
    dtype = torch.int64 if name == "top_k" else torch.float64 if logits.dtype == torch.float64 else torch.float32
    value = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else dtype, device=logits.device)
    if value.ndim > 1 or (value.ndim == 1 and (logits.ndim < 2 or len(value) != logits.shape[0])):
        raise ValueError(f"{name}: shape {list(value.shape)} came, expected a number or one per request of the batch")
    good = value >= low if low_included else value > low
    good = good & (value <= high) if high is not None else good & torch.isfinite(value)
    if not bool(good.all()):
        came = value.flatten()[(~good).flatten()][0].item()
        bracket = "[" if low_included else "("
        span = f"{bracket}{low}, {'inf)' if high is None else f'{high}]'}"
        raise ValueError(f"{name}: {came} came, expected a value in {span}")
    return value.to(dtype).reshape(-1, *(1,) * (logits.ndim - 1)) if value.ndim else value.to(dtype)
