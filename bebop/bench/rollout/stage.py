"""bench rollout: tokens per second of the engine with MTP speculation and without, by batch size, and the planner.

On vLLM the step times at k = 0..K and the acceptance of the heads are measured first; from them k is chosen for each
batch size (`bebop.bench.rollout.planner`) and written to schedule.json, which `rollout.draft_schedule` takes. Then the
engine that follows the schedule is measured against the one without speculation. A `rollout.draft_schedule` in the
config is measured as it is.

Both engines are loaded at the same time and take turns in every repetition, so that a machine that slows down slows
both. In a turn, one batch of requests is always running: when a request ends, the next one starts, as in a rollout with
more prompts than fit into a batch. A turn has at least TURN_BATCHES batches of requests, and more if these have room
for fewer than TURN_TOKENS tokens. A response ends by itself or at `data.max_response_tokens`. The reported speed is the
median over the repetitions.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bebop.bench import conditions, policy_and_prompts, spread, write_rows
from bebop.bench.rollout import planner
from bebop.bench.rollout.probe import Probed, difference, memory_bytes_per_s, probe, weight_bytes
from bebop.config import BenchConfig
from bebop.config.draft_schedule import from_sizes, k_for, text
from bebop.data.self_distill import rollout_sampling
from bebop.engines import RolloutEngine, make_engine
from bebop.records import DraftCounts, Rollout, Sampling
from bebop.store.environment import installed
from bebop.store.files import write_json
from bebop.store.tables import print_table, write_csv

TURN_TOKENS, TURN_BATCHES = 384, 2


SHOWN = {  # title in the console -> key
    "batch": "batch_size",
    "speculation": "speculation",
    "k": "k",
    "tokens/s": "tokens_per_s",
    "lowest": "tokens_per_s_low",
    "highest": "tokens_per_s_high",
    "AL": "acceptance_length",
    "speed-up": "speedup",
    "decoding": "decode_speedup",
    "predicted": "predicted_speedup",
}


def run(config: BenchConfig, run_dir: Path) -> dict[str, Any]:
    """Measure, print tables, write CSVs, schedule.json, a plot and summary.json to run_dir; returns the summary."""
    prompts, summary = policy_and_prompts(config, max(16, *config.bench.batch_sizes))
    policy_dir = Path(summary["policy"])
    rollout, plans = config.rollout, False
    if rollout.speculation == "mtp" and rollout.engine == "vllm" and rollout.draft_schedule is None:
        plans = True
        rollout = rollout.model_copy(update={"draft_schedule": {"1+": rollout.num_speculative_tokens}})
    kinds = ["none", "mtp"] if rollout.speculation == "mtp" else ["none"]
    engines: dict[str, RolloutEngine] = {}
    choices: dict[int, planner.Choice] = {}
    try:
        for kind in tqdm(kinds, desc="engines"):
            section = rollout.model_copy(update={"speculation": kind})
            engines[kind] = make_engine(section, policy_dir, seed=config.seed, dtype=config.model.dtype)
        schedule = rollout.draft_schedule or {"1+": rollout.num_speculative_tokens}
        if plans:
            batches = {size: _batch(prompts, size, 0) for size in config.bench.batch_sizes}
            found = probe(engines["none"], engines["mtp"], batches, replace(_sampling(config), ignore_eos=True))
            planned = planner.choose(found.step_s, found.plain_s, found.accepted)
            choices = {choice.batch_size: choice for choice in planned}
            schedule = from_sizes(planner.schedule(found.step_s, found.plain_s, found.accepted))
            summary |= _write_plan(config, run_dir, policy_dir, found, planned, schedule)
            engines["mtp"].set_draft_schedule(schedule)
        rows = [
            row
            for size in config.bench.batch_sizes
            for row in _measure(config, engines, prompts, size, schedule, choices.get(size))
        ]
    finally:
        for engine in engines.values():
            engine.close()
    return write_rows(run_dir, "bench.csv", rows, SHOWN, summary)


def _write_plan(
    config: BenchConfig,
    run_dir: Path,
    policy_dir: Path,
    found: Probed,
    choices: list[planner.Choice],
    schedule: Mapping[str, int],
) -> dict[str, Any]:
    """plan.csv, schedule.json and plan.png; returns what the summary keeps of them."""
    from bebop.bench.rollout import plot as plan_plot

    weights, bandwidth = weight_bytes(policy_dir), memory_bytes_per_s()
    lengths = planner.acceptance_lengths(found.accepted)
    table = []
    for choice in choices:
        plain = found.plain_s[choice.batch_size]
        times = {"none": plain} | dict(enumerate(found.step_s[choice.batch_size]))
        for k, step_s in times.items():
            length = 1.0 if k == "none" else lengths[k]
            floor = planner.floor_s(weights, bandwidth, 0 if k == "none" else k, speculating=k != "none")
            table.append(
                {
                    "batch_size": choice.batch_size,
                    "k": k,
                    "step_ms": 1e3 * step_s,
                    "steps_of_plain": step_s / plain,
                    "acceptance_length": length,
                    "tokens_per_s": choice.batch_size * length / step_s,
                    "speedup": length * plain / step_s,
                    "floor_ms": 1e3 * floor,
                    "chosen": k == choice.k,
                }
            )
    write_csv(run_dir / "plan.csv", table)
    print_table(table)
    plan_plot.write(table, run_dir / "plan.png")
    verdict = planner.verdict(choices, text(schedule))
    print(
        f"{verdict}\nweights are read at {bandwidth / 1e9:.1f} GB/s at best: floor_ms is that time for a step's bytes"
    )
    kept = {
        "schedule": dict(schedule),
        "verdict": verdict,
        "accepted": list(found.accepted),
        "drafts_counted": found.drafts,
        "memory_gb_per_s": bandwidth / 1e9,
        "weight_bytes": weights,
    }
    made = conditions(config) | {"policy": policy_dir, "rule": config.rollout.rule}
    made |= {"temperature": config.rollout.temperature, "batch_sizes": config.bench.batch_sizes}
    write_json(run_dir / "schedule.json", kept | made)
    return {**kept, "plan": table}


def _measure(
    config: BenchConfig,
    engines: Mapping[str, Any],
    prompts: list[list[int]],
    size: int,
    schedule: Mapping[str, int],
    choice: planner.Choice | None,
) -> list[dict[str, Any]]:
    """One row of bench.csv per engine at one batch size; the first, unmeasured turn of each warms it up.

    tokens_per_s: of whole turns, prefill and the thinning end with them; decode_tokens_per_s: of the steps in which
    the whole batch decodes, which is what the planner predicts. acceptance_length: pooled over the repeats,
    1 + accepted / drafts; None where nothing was drafted. k: drafts per step of a full batch.
    """
    speeds: dict[str, list[tuple[float, float | None]]] = {kind: [] for kind in engines}
    counted = dict.fromkeys(engines, DraftCounts())
    for turn in tqdm(range(-1, config.bench.repeats), desc=f"batch {size}"):
        for kind in list(engines) if turn % 2 else list(engines)[::-1]:
            before = engines[kind].counts()
            speed = _speeds(config, engines[kind], prompts, size, turn)
            if turn >= 0:
                speeds[kind].append(speed)
                counted[kind] += difference(engines[kind].counts(), before)
    k = {"none": 0, "mtp": k_for(size, schedule)}
    predicted = {"none": choice.plain_tokens_per_s, "mtp": choice.tokens_per_s[choice.k]} if choice else {}
    whole = {kind: [speed for speed, _ in values] for kind, values in speeds.items()}
    decode = {kind: [speed for _, speed in values] for kind, values in speeds.items()}
    return [
        {
            "batch_size": size,
            "speculation": kind,
            "rule": config.rollout.rule if kind == "mtp" else "",
            "k": k[kind],
            "temperature": config.rollout.temperature,
            **spread(whole[kind]),
            "acceptance_length": counted[kind].acceptance_length,
            "speedup": _ratio(whole[kind], whole["none"]),
            "decode_tokens_per_s": statistics.median(decode[kind]),
            "decode_speedup": _ratio(decode[kind], decode["none"]),
            "predicted_tokens_per_s": predicted.get(kind),
            "predicted_speedup": choice.speedup if choice and kind == "mtp" else None,
            "response_tokens": config.data.max_response_tokens,
            **conditions(config),
            "vllm": dict(installed())["vllm"],
        }
        for kind in engines
    ]


def _speeds(
    config: BenchConfig, engine: RolloutEngine, prompts: list[list[int]], size: int, turn: int
) -> tuple[float, float]:
    """Tokens per second of one turn: of everything, and of the steps in which all `size` requests decode."""
    sampling = _sampling(config)
    rounds = max(TURN_BATCHES, -(-TURN_TOKENS // (size * sampling.max_tokens))) if turn >= 0 else 1
    chosen = [prompt for n in range(rounds) for prompt in _batch(prompts, size, max(turn, 0) * rounds + n)]
    engine.take_steps()
    started = time.perf_counter()
    rollouts = asyncio.run(_keep_full(engine, chosen, sampling, size))
    whole = sum(len(rollout.token_ids) for rollout in rollouts) / (time.perf_counter() - started)
    return whole, planner.full_steps(engine.take_steps(), size).tokens_per_s


async def _keep_full(engine: RolloutEngine, prompts: list[list[int]], sampling: Sampling, size: int) -> list[Rollout]:
    """Sample a response to each prompt, `size` at a time."""
    room = asyncio.Semaphore(size)

    async def one(prompt: list[int]) -> Rollout:
        async with room:
            return await engine.agenerate(prompt, sampling)

    return await asyncio.gather(*map(one, prompts))


def _sampling(config: BenchConfig) -> Sampling:
    return replace(rollout_sampling(config), seed=None)  # requests with seeds of their own cost vLLM a generator each


def _batch(prompts: list[list[int]], size: int, number: int) -> list[list[int]]:
    """The `number`th batch of `size` prompts, round and round."""
    return [prompts[(number * size + i) % len(prompts)] for i in range(size)]


def _ratio(values: list[float], plain: list[float]) -> float:
    """Median of the turns' ratios: two turns side by side saw the same machine."""
    return statistics.median(a / b for a, b in zip(values, plain, strict=True))
