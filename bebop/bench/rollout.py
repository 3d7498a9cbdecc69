"""bench rollout: tokens per second of the engine with MTP speculation and without, by batch size.

Both engines run at once and take turns in every repetition, so that a machine that slows down slows both. All requests
of a batch start together and sample exactly `data.max_response_tokens` tokens; the median of the repetitions counts.
"""

from __future__ import annotations

import csv
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bebop.backbone import prepare_policy
from bebop.config import BenchConfig
from bebop.data import encode_prompt, load_tokenizer, make_prompts
from bebop.doctor.installed import device, installed
from bebop.engines import RolloutEngine, make_engine
from bebop.monitor import print_table, write_summary
from bebop.records import Sampling


@dataclass(frozen=True)
class Measured:
    """One line of bench.csv. Speeds are response tokens per second over all requests, median and range of repeats.

    acceptance_length: pooled over the repeats, 1 + accepted / drafts; None without speculation.
    """

    batch_size: int
    speculation: str
    rule: str
    num_speculative_tokens: int
    temperature: float
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    acceptance_length: float | None
    speedup: float
    repeats: int
    response_tokens: int
    model: str
    dtype: str
    device: str
    vllm: str


def run(config: BenchConfig, run_dir: Path) -> dict[str, Any]:
    """Measure, print a table, write bench.csv and summary.json to run_dir; returns the summary."""
    policy_dir = prepare_policy(config.model, config.seed)
    prompts = _prompts(config, policy_dir)
    kinds = ["none", "mtp"] if config.rollout.speculation == "mtp" else ["none"]
    engines: dict[str, RolloutEngine] = {}
    try:
        for kind in tqdm(kinds, desc="engines"):
            section = config.rollout.model_copy(update={"speculation": kind})
            engines[kind] = make_engine(section, policy_dir, seed=config.seed, dtype=config.model.dtype)
        rows = [row for size in config.bench.batch_sizes for row in _measure(config, engines, prompts, size)]
    finally:
        for engine in engines.values():
            engine.close()
    table = [asdict(row) for row in rows]
    with open(run_dir / "bench.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys())
        writer.writeheader()
        writer.writerows(table)
    lines = [
        {
            "batch": row.batch_size,
            "speculation": row.speculation,
            "tokens/s": round(row.tokens_per_s),
            "lowest": round(row.tokens_per_s_low),
            "highest": round(row.tokens_per_s_high),
            "AL": row.acceptance_length,
            "speed-up": row.speedup,
        }
        for row in rows
    ]
    print_table(lines)
    summary = {"policy": str(policy_dir), "rows": table}
    write_summary(run_dir, summary)
    return summary


def _measure(
    config: BenchConfig, engines: dict[str, RolloutEngine], prompts: list[list[int]], size: int
) -> list[Measured]:
    """One row per engine at one batch size; the first, unmeasured turn of each warms it up."""
    batch = [prompts[i % len(prompts)] for i in range(size)]
    speeds: dict[str, list[float]] = {kind: [] for kind in engines}
    before = {}
    for turn in tqdm(range(-1, config.bench.repeats), desc=f"batch {size}"):
        order = list(engines) if turn % 2 else list(engines)[::-1]
        for kind in order:
            if turn == 0:
                before[kind] = engines[kind].counts()
            speed = _tokens_per_s(config, engines[kind], batch)
            if turn >= 0:
                speeds[kind].append(speed)
    versions = dict(installed())
    plain = statistics.median(speeds["none"])
    rows = []
    for kind, engine in engines.items():
        after, then = engine.counts(), before[kind]
        drafts = after.num_drafts - then.num_drafts
        accepted = sum(after.accepted_per_depth) - sum(then.accepted_per_depth)
        middle = statistics.median(speeds[kind])
        rows.append(
            Measured(
                batch_size=size,
                speculation=kind,
                rule=config.rollout.rule if kind == "mtp" else "",
                num_speculative_tokens=config.rollout.num_speculative_tokens if kind == "mtp" else 0,
                temperature=config.rollout.temperature,
                tokens_per_s=middle,
                tokens_per_s_low=min(speeds[kind]),
                tokens_per_s_high=max(speeds[kind]),
                acceptance_length=1.0 + accepted / drafts if drafts else None,
                speedup=middle / plain,
                repeats=config.bench.repeats,
                response_tokens=config.data.max_response_tokens,
                model=config.model.name,
                dtype=config.model.dtype,
                device=device(),
                vllm=versions["vllm"],
            )
        )
    return rows


def _tokens_per_s(config: BenchConfig, engine: RolloutEngine, batch: list[list[int]]) -> float:
    sampling = Sampling(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_tokens=config.data.max_response_tokens,
        logprobs=True,
        ignore_eos=True,
    )
    started = time.perf_counter()
    rollouts = engine.generate(batch, sampling)
    return sum(len(rollout.token_ids) for rollout in rollouts) / (time.perf_counter() - started)


def _prompts(config: BenchConfig, policy_dir: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(policy_dir)
    made = make_prompts(config.data.tasks, max(config.bench.batch_sizes), config.seed, "eval")
    return [encode_prompt(tokenizer, prompt) for prompt in made]
