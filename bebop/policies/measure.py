"""What a policy can do: sampled responses, scored by the tasks' verifiers, with the entropy they were sampled at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bebop.data.tasks import score
from bebop.data.tokenizer import encode_prompt
from bebop.records import Prompt


@torch.no_grad()
def measure(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    temperature: float = 1.0,
    samples: int = 1,
    max_tokens: int = 224,
    seed: int = 0,
    batch_size: int = 256,
) -> dict[str, float]:
    """Sample `samples` responses to each prompt (temperature 0: greedy) and describe them.

    Returns reward (mean in [0, 1]), solved (share of prompts with a fully right response among its samples),
    entropy_nats and top_probability (means over response tokens, at the temperature), length_mean, length_min,
    length_max (tokens, the end token counted) and finished (share that ended by itself).
    """
    wanted = [prompt for prompt in prompts for _ in range(samples)]
    generator = torch.Generator().manual_seed(seed)
    rewards: list[float] = []
    lengths: list[int] = []
    finished = 0
    entropy_sum = top_sum = 0.0
    for at in range(0, len(wanted), batch_size):
        part = wanted[at : at + batch_size]
        heads = [encode_prompt(tokenizer, prompt) for prompt in part]
        tokens, entropy, top, alive = _sample(model, heads, tokenizer, temperature, max_tokens, generator)
        entropy_sum += float((entropy * alive).sum())
        top_sum += float((top * alive).sum())
        for prompt, row, length in zip(part, tokens.tolist(), alive.sum(1).tolist(), strict=True):
            ids = row[: int(length)]
            finished += ids[-1] == tokenizer.eos_token_id
            rewards.append(score(prompt, tokenizer.decode(ids, skip_special_tokens=True)))
            lengths.append(len(ids))
    by_prompt = [rewards[i : i + samples] for i in range(0, len(rewards), samples)]
    num_tokens = sum(lengths)
    return {
        "reward": sum(rewards) / len(rewards),
        "solved": sum(max(group) >= 1 for group in by_prompt) / len(by_prompt),
        "entropy_nats": entropy_sum / num_tokens,
        "top_probability": top_sum / num_tokens,
        "length_mean": num_tokens / len(lengths),
        "length_min": min(lengths),
        "length_max": max(lengths),
        "finished": finished / len(lengths),
    }


def _sample(
    model: Any, heads: list[list[int]], tokenizer: Any, temperature: float, max_tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left-padded cached sampling: tokens [B, N], entropy [B, N], top probability [B, N], alive [B, N] (bool)."""
    width = max(map(len, heads))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(head)) + head for head in heads])
    mask = torch.tensor([[0] * (width - len(head)) + [1] * len(head) for head in heads])
    columns: list[tuple[Tensor, ...]] = []
    alive = torch.ones(len(heads), dtype=torch.bool)
    cache = None
    for _ in range(max_tokens):
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, logits_to_keep=1)
        cache = out.past_key_values
        logprobs = (out.logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)
        probs = logprobs.exp()
        token = probs.argmax(-1) if temperature == 0 else probs.multinomial(1, generator=generator)[:, 0]
        columns.append((token, -(probs * logprobs.clamp(min=-1e4)).sum(-1), probs.amax(-1), alive))
        alive = alive & (token != tokenizer.eos_token_id)
        if not alive.any():
            break
        ids = token[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    tokens, entropy, top, lived = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
    return tokens, entropy, top, lived
