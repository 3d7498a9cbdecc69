"""Sampling by inverse CDF, for vLLM on a CPU.

vLLM samples a token as argmax_v p_v / e_v, with an exponential random number e_v for every token of the vocabulary. On
a CPU, making these numbers is most of the time of a step (217 ms in a batch of 64 at V = 49,152), and speculation
samples once more for each depth and once for the residual. Here one uniform number u gives the first token whose
cumulative weight exceeds u times the total: 12 ms in that batch. Sums are float64; a token of weight 0 is never
sampled. For vLLM 0.31.0; can go when its CPU path stops making V numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ROWS = 64  # rows sampled together; bounds the float64 copy
GREEDY = 1e-5  # vLLM's own limit


def draw(weights: Tensor, generators: Mapping[int, torch.Generator]) -> Tensor:
    """One index per row, in proportion to its weights.

    weights: [N, V] >= 0, float32; generators: row -> its own random stream; other rows use torch's global one. Returns
    [N] long. A row whose weights are all 0 gives V - 1.
    """
    uniform = torch.rand(weights.shape[0], 1, dtype=torch.float64)
    for row, generator in generators.items():
        if row < weights.shape[0]:
            uniform[row] = torch.rand(1, dtype=torch.float64, generator=generator)
    drawn = []
    for block, u in zip(weights.split(ROWS), uniform.split(ROWS), strict=True):
        cumulative = block.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # u * total may be rounded up to the total, and no token is above it
        point = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
        drawn.append(torch.searchsorted(cumulative, point, right=True).squeeze(-1))
    return torch.cat(drawn).clamp_(max=weights.shape[1] - 1)


def draft_tokens(logits: Tensor, sampling_metadata: Any, use_fp64_gumbel: bool = False) -> tuple[Tensor, Tensor]:
    """Draft tokens [B] and the distributions [B, V] from which they were sampled; logits: [B, V].

    Replaces vLLM's `compute_probs_and_sample_next_token`, which does not use the generators of seeded requests.
    """
    if sampling_metadata.all_greedy:
        return logits.argmax(dim=-1), logits
    temperature = sampling_metadata.temperature
    greedy = temperature < GREEDY
    probs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).softmax(-1, dtype=torch.float32)
    generators = {row: g for row, g in sampling_metadata.generators.items() if row < len(greedy) and not greedy[row]}
    tokens = draw(probs, generators)
    return (tokens if sampling_metadata.all_random else torch.where(greedy, probs.argmax(-1), tokens)), probs


def recovered_tokens(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    sampling_metadata: Any,
    device: torch.device,
    use_fp64_gumbel: bool = False,
) -> Tensor:
    """For each draft token, the token that replaces it if it is rejected, sampled from norm(max(0, p - q)).

    draft_token_ids: [N], -1 for the padding of a request without a draft; target_probs: [N, V]; draft_probs: [N, V];
    None for deterministic drafts (q is 1 at the draft token).
    """
    if not len(draft_token_ids):
        return torch.empty_like(draft_token_ids)
    if draft_probs is None:
        drafted = torch.arange(target_probs.shape[1], device=target_probs.device) == draft_token_ids[:, None]
        residual = target_probs.masked_fill(drafted, 0.0)
    else:
        residual = (target_probs - draft_probs).clamp_(min=0)
    generators, row = {}, 0
    for request, count in enumerate(num_draft_tokens):
        if request in sampling_metadata.generators:
            generators |= dict.fromkeys(range(row, row + count), sampling_metadata.generators[request])
        row += count
    return draw(residual, generators).to(draft_token_ids.dtype)


def apply(replace: Callable[[Any, str, Callable], None]) -> None:
    """Replace vLLM's functions by these. Raises AttributeError if vLLM has no such function."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.spec_decode import llm_base_proposer

    sampler = topk_topp_sampler.TopKTopPSampler
    stock = sampler.forward_cpu

    @functools.wraps(stock)
    def forward_cpu(
        self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        kept = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        tokens = draw(kept.softmax(dim=-1, dtype=torch.float32), generators)
        if self.logprobs_mode == "processed_logprobs":
            return tokens, kept.log_softmax(dim=-1, dtype=torch.float32)
        return tokens, kept if self.logprobs_mode == "processed_logits" else None

    replace(sampler, "forward_cpu", forward_cpu)
    replace(rejection_sampler, "sample_recovered_tokens", recovered_tokens)
    replace(llm_base_proposer, "compute_probs_and_sample_next_token", draft_tokens)
