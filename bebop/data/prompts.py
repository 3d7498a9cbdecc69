"""Prompts from tasks: deterministic, and in splits that cannot overlap.

The hash of a question's text determines its split, whatever the seed. So no prompt of GRPO or eval was seen when the
policy was pre-trained or the heads were trained.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bebop.config import Task
from bebop.data.rows import told
from bebop.data.tasks import source, worked_solution
from bebop.data.tokenizer import TemplateRaised, encode_prompt
from bebop.errors import BadInput
from bebop.records import Prompt

log = logging.getLogger(__name__)

# Sixteenths of all questions. pretrain: the tiny policy; train, heldout: the heads; rl: GRPO; eval: the eval command.
SPLITS = {
    "pretrain": range(0, 6),
    "train": range(6, 10),
    "heldout": range(10, 11),
    "rl": range(11, 15),
    "eval": range(15, 16),
}
MAX_TRIES = 2000
RAISED = "prompt at which the chat template raises"
TOO_LONG = "prompt longer than data.max_prompt_tokens"


def split_of(question: str) -> str:
    """The split of a question."""
    bucket = hashlib.sha256(question.encode()).digest()[0] % 16
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def make_prompts(tasks: Sequence[Task], n: int, seed: int, split: str, *, solutions: bool = True) -> list[Prompt]:
    """`n` prompts of `split`, drawn from `tasks` by their weights; the same list for the same arguments.

    With solutions, a prompt has a worked solution if its task has a writer. A task with few questions repeats them.
    Raises ValueError for an unknown task, parameter or split, and for a task without a question in the split.
    """
    if split not in SPLITS:
        raise BadInput(f"split={split!r}: expected one of {', '.join(SPLITS)}")
    if not tasks:
        raise BadInput("data.tasks is empty: name at least one task")
    draw = random.Random(f"{split}/{seed}")
    chosen = draw.choices(range(len(tasks)), weights=[task.weight for task in tasks], k=n)
    streams = [_Questions(task, seed, split, place) for place, task in enumerate(tasks)]
    return [streams[i].next(solutions) for i in chosen]


class _Questions:
    """The questions of one task in one split, in the order of their index in reasoning-gym's data set."""

    def __init__(self, task: Task, seed: int, split: str, place: int) -> None:
        self.task, self.seed, self.split = task, seed, split
        self.source = source(task.name)
        self.items = self.source.items(task.params)
        # neighbouring items may be similar; starts that are far apart keep two seeds from sharing items
        self.index = random.Random(f"{task.name}/{place}/{split}/{seed}").randrange(2**31)

    def next(self, solutions: bool) -> Prompt:
        for _ in range(MAX_TRIES):
            self.index = (self.index + 1) % self.source.num_items
            item = self.items[self.index]
            if split_of(item["question"]) == self.split:
                return self._prompt(item, solutions)
        raise BadInput(
            f"data.tasks {self.task.name} params={self.task.params}: no question of split {self.split} "
            f"in {MAX_TRIES} tries; give the task more digits, terms or values"
        )

    def _prompt(self, item: dict[str, Any], solutions: bool) -> Prompt:
        entry = {}
        if self.source.verify is not None:
            entry = json.loads(json.dumps({**item, "params": self.task.params}, default=str))
        text = item["question"] + (f"\n{self.task.instruction}" if self.task.instruction else "")
        return Prompt(
            prompt_id=f"{self.task.name}/{self.seed}/{self.index}",
            task=self.task.name,
            text=text,
            solution=worked_solution(self.task.name, entry) if solutions else None,
            entry=entry,
        )


def encode_prompts(
    prompts: Sequence[Prompt], max_tokens: int, tokenizer: Any, left_out: Counter[str] | None = None
) -> list[tuple[Prompt, list[int]]]:
    """Prompts with their token ids. Raises BadInput if none is left.

    Left out, and counted by reason in `left_out`: prompts longer than max_tokens (data.max_prompt_tokens), and prompts
    for which the chat template raises.
    """
    encoded, counts, raised = [], Counter[str](), None
    for prompt in prompts:
        try:
            encoded.append((prompt, encode_prompt(tokenizer, prompt)))
        except TemplateRaised as error:
            counts[RAISED] += 1
            raised = raised or error
    if raised is not None and not encoded:
        raise raised
    short = [(prompt, ids) for prompt, ids in encoded if len(ids) <= max_tokens]
    if not short:
        raise BadInput(
            f"data.max_prompt_tokens={max_tokens}: all {len(encoded)} prompts are longer, the shortest has "
            f"{min(len(ids) for _, ids in encoded)} tokens; raise it"
        )
    counts[TOO_LONG] += len(encoded) - len(short)
    if counts := +counts:
        log.warning("text: %d of %d prompts are left out: %s", sum(counts.values()), len(prompts), told(counts))
    if left_out is not None:
        left_out.update(counts)
    return short
