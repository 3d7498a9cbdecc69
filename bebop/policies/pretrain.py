"""Training of the tiny policy: next-token prediction on worked solutions, with the loss only on the response.

A plain loop: padded batches of like length (right padding under causal attention needs no mask), cosine
schedule, Muon for the layers' matrices: in the same two minutes AdamW by itself does not learn to copy digits. The
solutions have slips, and a share of them no `Answer:` (bebop.data.worked_solutions), so that the policy errs a chosen
share of the time at T = 1.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from bebop.config import TinyModel
from bebop.data.prompts import make_prompts
from bebop.data.tasks import worked_solution
from bebop.data.tokenizer import encode_prompt
from bebop.data.worked_solutions import WRITERS, Hand
from bebop.errors import BadInput

Example = tuple[list[int], int]  # token ids of prompt and response, length of the prompt
ADAMW_SHARE = 0.4  # AdamW's learning rate, as a share of Muon's
POOL = 32  # batches whose examples are sorted by length together


def worked_examples(tokenizer: Any, tiny: TinyModel, n: int, seed: int) -> list[Example]:
    """`n` examples of split `pretrain`. Raises ValueError on a task without a writer."""
    tasks = tiny.tasks
    for task in tasks:
        if task.name not in WRITERS:
            raise BadInput(
                f"model.tiny.tasks name={task.name}: no worked-solution writer; expected one of {', '.join(WRITERS)}"
            )
    prompts = make_prompts(tasks, n, seed, "pretrain", solutions=False)
    texts = [
        worked_solution(prompt.task, prompt.entry, Hand(tiny.slip_rate, tiny.unmarked_share, f"{seed}/{i}"))
        for i, prompt in enumerate(prompts)
    ]
    responses = tokenizer(texts, add_special_tokens=False)["input_ids"]
    examples = []
    for prompt, response in zip(prompts, responses, strict=True):
        head = encode_prompt(tokenizer, prompt)
        examples.append((head + response + [tokenizer.eos_token_id], len(head)))
    return examples


def train_tiny(model: Any, tokenizer: Any, tiny: TinyModel, seed: int, *, progress: bool = True) -> dict[str, float]:
    """Train `model` (a Qwen2ForCausalLM) in place; returns the last loss (nats per token), tokens seen and seconds."""
    start = time.perf_counter()
    rng = random.Random(seed)
    batches = _batches(tokenizer, tiny, seed, rng)
    optimizers = _optimizers(model, tiny.pretrain_lr)
    warmup = max(1, tiny.pretrain_steps // 20)
    model.train()
    threads = FasterThreads()
    num_tokens, smooth = 0, math.nan
    with tqdm(batches, desc="tiny policy", disable=not progress, unit="step") as bar:
        for step, (ids, labels) in enumerate(bar):
            threads.before_step(step)
            rise = min(1.0, (step + 1) / warmup)
            fall = 0.5 * (1 + math.cos(math.pi * step / len(batches)))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * rise * (0.02 + 0.98 * fall)
            hidden = model.model(ids, use_cache=False).last_hidden_state
            wanted = labels >= 0
            loss = F.cross_entropy(model.lm_head(hidden[wanted]).float(), labels[wanted])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            num_tokens += int((ids != tokenizer.pad_token_id).sum())
            smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
            bar.set_postfix(loss=f"{smooth:.3f}")
    threads.restore()
    model.eval()
    return {"loss_nats": smooth, "num_tokens": num_tokens, "train_s": time.perf_counter() - start}


class FasterThreads:
    """All threads or one, whichever is faster now: steps this small lose by threads wherever another job takes a core.

    Every `PERIOD` steps both settings are timed over `TRIAL` steps each. Results do not depend on it.
    """

    PERIOD, TRIAL = 100, 3

    def __init__(self) -> None:
        self._all = torch.get_num_threads()
        self._marks: list[float] = []

    def before_step(self, step: int) -> None:
        phase = step % self.PERIOD
        if self._all == 1 or phase > 2 * self.TRIAL:
            return
        if phase % self.TRIAL == 0:
            self._marks = [*(self._marks if phase else []), time.perf_counter()]
        if phase == 0:
            torch.set_num_threads(self._all)
        elif phase == self.TRIAL:
            torch.set_num_threads(1)
        elif phase == 2 * self.TRIAL:
            start, middle, end = self._marks
            torch.set_num_threads(self._all if middle - start <= end - middle else 1)

    def restore(self) -> None:
        torch.set_num_threads(self._all)


def _optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest; each group remembers its peak learning rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAMW_SHARE * lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def init_weights(model: Any, seed: int) -> None:
    """Draw the weights at the scale of their fan-in, what writes into the residual stream smaller by its depth."""
    generator = torch.Generator().manual_seed(seed)
    depth = 2 * model.config.num_hidden_layers
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim != 2:
                continue
            scale = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                scale *= depth**-0.5
            elif "lm_head" in name:
                scale *= 0.2
            weight.normal_(0, scale, generator=generator)


def _batches(tokenizer: Any, tiny: TinyModel, seed: int, rng: random.Random) -> list[tuple[Tensor, Tensor]]:
    """[B, T] token ids and [B, T] labels (-100 on prompt and padding) of every optimizer step, in order."""
    probe = worked_examples(tokenizer, tiny, 256, seed + 1)
    per_batch = max(1, round(tiny.pretrain_batch_tokens * len(probe) / sum(len(ids) for ids, _ in probe)))
    total = per_batch * tiny.pretrain_steps
    examples = worked_examples(tokenizer, tiny, total, seed)
    batches = []
    for at in range(0, total, POOL * per_batch):
        pool = sorted(examples[at : at + POOL * per_batch], key=lambda example: len(example[0]))
        group = [pool[i : i + per_batch] for i in range(0, len(pool), per_batch)]
        rng.shuffle(group)
        batches += [_pad(examples, tokenizer.pad_token_id) for examples in group]
    return batches


def _pad(examples: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids, _ in examples)
    ids = torch.full((len(examples), width), pad_id)
    labels = torch.full((len(examples), width), -100)
    for row, (tokens, prompt_length) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_length - 1 : len(tokens) - 1] = torch.tensor(tokens[prompt_length:])
    return ids, labels
