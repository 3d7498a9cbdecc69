"""GRPO's prompts as the parquet that verl reads, one row for each prompt, in the order of training.

`reward_model.ground_truth` holds the prompt's record as JSON, which is all that the verifier needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop.config import Task
from bebop.data.prompts import make_prompts
from bebop.data.tasks import pack
from bebop.data.tokenizer import encode_prompt
from bebop.errors import BadInput
from bebop.records import Prompt


def rows(prompts: Sequence[Prompt]) -> list[dict]:
    """verl's columns: data_source, prompt (chat messages), reward_model, extra_info with the row's index and id."""
    return [
        {
            "data_source": prompt.task,
            "prompt": [{"role": "user", "content": prompt.text}],
            "reward_model": {"style": "rule", "ground_truth": pack(prompt)},
            "extra_info": {"index": index, "prompt_id": prompt.prompt_id},
        }
        for index, prompt in enumerate(prompts)
    ]


def prompts_that_fit(
    tasks: Sequence[Task], number: int, seed: int, tokenizer: Any, max_tokens: int
) -> tuple[list[Prompt], int]:
    """`number` prompts of at most `max_tokens` tokens, and how many longer ones were left out.

    The same arguments give the same list. Raises BadInput if fewer than one prompt in twenty fits.
    """
    asked = number
    while True:
        prompts = make_prompts(tasks, asked, seed, "rl", solutions=False)  # starts with the same prompts each time
        fits = [i for i, prompt in enumerate(prompts) if len(encode_prompt(tokenizer, prompt)) <= max_tokens]
        if len(fits) >= number:
            return [prompts[i] for i in fits[:number]], fits[number - 1] + 1 - number
        if asked >= 20 * number:
            raise BadInput(
                f"data.max_prompt_tokens: got {max_tokens}, and only {len(fits)} of {asked} prompts of data.tasks are "
                "that short; raise it"
            )
        asked *= 2


def write_parquet(prompts: Sequence[Prompt], path: Path) -> Path:
    """Write the rows of `prompts` and return the file."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(prompts)), path)
    return path
