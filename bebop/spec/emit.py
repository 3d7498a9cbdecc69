"""What of a verified run a request keeps: it ends at a stop token, which may stand inside the run, or at its limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.errors import BadInput


def keep_until_stop(
    tokens: Tensor, allowed: Tensor | int, stop_token_ids: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut each run behind its first stop token, and at the number of tokens the request may still emit.

    tokens long [B, L], padded with -1; allowed: a number or long [B], at least 1.
    -> (tokens, padded with -1; num_kept long [B]; stopped bool [B]). The stop token is kept. Not stopped and
    num_kept == allowed: the reason is "length". Log-probabilities and versions are cut by the same num_kept.
    """
    allowed = torch.as_tensor(allowed, device=tokens.device)
    if bool((allowed < 1).any()):
        raise BadInput(f"allowed: {int(allowed.min())} came, expected at least 1; a finished request emits nothing")
    place = torch.arange(tokens.shape[1], device=tokens.device)
    num_tokens = (tokens >= 0).sum(1)
    is_stop = torch.isin(tokens, torch.tensor(list(stop_token_ids), dtype=tokens.dtype, device=tokens.device))
    first_stop = torch.where(is_stop, place, tokens.shape[1]).amin(1)
    num_kept = torch.minimum(torch.minimum(num_tokens, first_stop + 1), allowed.expand_as(num_tokens))
    return torch.where(place < num_kept.unsqueeze(1), tokens, -1), num_kept, first_stop < num_kept
