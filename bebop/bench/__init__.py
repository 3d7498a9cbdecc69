"""bench: measurements, one module per suite (`bench.suite`). Each prints a table and writes a CSV and summary.json.

Below: what the suites share.
"""

from __future__ import annotations

import importlib
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bebop.config import BenchConfig

SUITES = {
    "rollout": "bebop.bench.rollout.stage",
    "kernels": "bebop.bench.kernels",
    "tree": "bebop.bench.tree.stage",
}


def run(config: BenchConfig, run_dir: Path) -> dict[str, Any]:
    """Run the suite that the config names; returns what it wrote to summary.json."""
    return importlib.import_module(SUITES[config.bench.suite]).run(config, run_dir)


def policy_and_prompts(config: BenchConfig, num_prompts: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Token ids of prompts of the config's tasks; and for the summary the policy's directory, and how many prompts
    were left out, by reason."""
    from bebop.data import load_tokenizer, make_prompts
    from bebop.data.prompts import encode_prompts
    from bebop.policies import prepare_policy

    policy_dir = prepare_policy(config.model, config.seed, max_model_len=config.rollout.max_model_len)
    made = make_prompts(config.data.tasks, num_prompts, config.seed, "eval")
    tokenizer, left_out = load_tokenizer(policy_dir), Counter[str]()
    prompts = [ids for _, ids in encode_prompts(made, config.data.max_prompt_tokens, tokenizer, left_out)]
    return prompts, {"policy": str(policy_dir), "left_out": dict(left_out)}


def conditions(config: BenchConfig) -> dict[str, Any]:
    """What every row of a table was measured under."""
    from bebop.store.environment import device

    model = config.model.name if config.model.path is None else str(config.model.path)
    return {"repeats": config.bench.repeats, "model": model, "dtype": config.model.dtype, "device": device()}


def spread(speeds: Sequence[float]) -> dict[str, float]:
    """Columns of a speed, in response tokens per second over all requests: median and range of the repeats."""
    median = statistics.median(speeds)
    return {"tokens_per_s": median, "tokens_per_s_low": min(speeds), "tokens_per_s_high": max(speeds)}


def write_rows(
    run_dir: Path, file: str, rows: list[dict[str, Any]], shown: Mapping[str, str], summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Write rows to `file` and to summary.json beside the rest of the summary, and print their columns `shown` (title
    -> key); returns the summary."""
    from bebop.store.run_folder import write_summary
    from bebop.store.tables import print_table, write_csv

    write_csv(run_dir / file, rows)
    print_table([{title: row[key] for title, key in shown.items()} for row in rows])
    whole = {**summary, "rows": rows}
    write_summary(run_dir, whole)
    return whole
