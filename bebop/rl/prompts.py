"""GRPO's prompts as the parquet that verl reads, one row a prompt, in the order of training.

A row carries the prompt's own record as JSON in `reward_model.ground_truth`, which is all that the verifier needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bebop.data.tasks import pack
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


def write_parquet(prompts: Sequence[Prompt], path: Path) -> Path:
    """Write the rows of `prompts` and return the file."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(prompts)), path)
    return path
