"""What the planner needs, measured on the running engines: step times at k = 0..K, and the acceptance of the heads.

One engine serves every k (`VllmEngine.set_draft_schedule`). All lengths and the engine without speculation take turns
in each pass, and a pass's steps are compared with that pass's plain steps: a machine that slows down slows all of them.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from bebop.bench.rollout.planner import Window, acceptance, full_steps
from bebop.engines.vllm_engine.engine import VllmEngine
from bebop.mtp.checkpoint import read_config, tensor_bytes
from bebop.mtp.families import decoder_config, known_family
from bebop.records import DraftCounts, Sampling
from bebop.store.environment import device_name

PASSES = 5
PROBE_TOKENS = 20  # response tokens of a request in each probe
TRIES = 4  # probes until all requests were there at once; on a busy machine they come in slowly
EXPERT = re.compile(r"\bexperts\.")  # a tensor of routed experts, one by one or stacked; shared ones have other names
EXPERTS = ("num_experts", "n_routed_experts")  # config keys of their number
Prompts = list[list[int]]


@dataclass(frozen=True)
class Probed:
    """plain_s: batch -> median step without speculation; step_s: batch -> [K+1] step at k = 0..K, by `relative_steps`.

    accepted: [K] P(first j drafts accepted); drafts: how many drafts stand behind its first entry.
    """

    step_s: dict[int, tuple[float, ...]]
    plain_s: dict[int, float]
    accepted: tuple[float, ...]
    drafts: int


def probe(plain: VllmEngine, drafting: VllmEngine, batches: Mapping[int, Prompts], sampling: Sampling) -> Probed:
    """Time both engines on each batch; `sampling`, except its length."""
    most = drafting.rollout.num_speculative_tokens
    windows: dict[tuple[int, int | None], list[Window]] = defaultdict(list)
    counted = {k: DraftCounts() for k in range(1, most + 1)}
    turns = [(size, k) for size in batches for k in (None, *range(most + 1))]
    for number in tqdm(range(-1, PASSES), desc="step times"):
        for size, k in turns if number % 2 else turns[::-1]:
            engine = plain if k is None else drafting
            if k is not None:
                drafting.set_draft_schedule({"1+": k})
            before = drafting.counts()
            if number < 0:  # warms up
                engine.generate(batches[size], _of_length(sampling, 4))
                continue
            windows[size, k].append(_timed(engine, batches[size], sampling))
            if k:
                counted[k] += difference(drafting.counts(), before)
    rates = acceptance({k: (counts.num_drafts, counts.accepted_per_depth[:k]) for k, counts in counted.items()})
    return Probed(
        step_s={
            size: tuple(relative_steps(windows[size, k], windows[size, None]) for k in range(most + 1))
            for size in batches
        },
        plain_s={size: _median_step(windows[size, None]) for size in batches},
        accepted=rates,
        drafts=sum(counts.num_drafts for counts in counted.values()),
    )


def _timed(engine: VllmEngine, prompts: Prompts, sampling: Sampling) -> Window:
    """The steps of all prompts together; longer responses where the first had ended before the last began."""
    for longer in range(TRIES):
        engine.take_steps()
        engine.generate(prompts, _of_length(sampling, PROBE_TOKENS * (1 + longer)))
        steps = engine.take_steps()
        with contextlib.suppress(ValueError):
            return full_steps(steps, len(prompts))
    return full_steps(steps, len(prompts))


def relative_steps(windows: Sequence[Window], plain: Sequence[Window]) -> float:
    """Plain step, s, times a step's ratio to the plain one of the same pass; of both the median over passes."""
    ratios = [ours.step_s / theirs.step_s for ours, theirs in zip(windows, plain, strict=True)]
    return statistics.median(ratios) * _median_step(plain)


def _median_step(windows: Sequence[Window]) -> float:
    return statistics.median(window.step_s for window in windows)


def difference(after: DraftCounts, before: DraftCounts) -> DraftCounts:
    """What was counted between two readings."""
    depths = len(after.accepted_per_depth)
    then = tuple(before.accepted_per_depth) + (0,) * (depths - len(before.accepted_per_depth))
    return DraftCounts(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        tuple(a - b for a, b in zip(after.accepted_per_depth, then, strict=True)),
    )


def memory_bytes_per_s(size: int = 2**28, repeats: int = 7, device: str | None = None) -> float:
    """Speed at which a device, by default the engines' own, reads its memory: the best of some sums over `size` bytes
    by torch, of four times as many on a GPU, where a sum ends too soon to be timed."""
    device = device or device_name()
    size *= 1 if device == "cpu" else 4
    block = torch.ones(size // 4, device=device)
    times = []
    for _ in range(repeats):
        _finish(device)
        started = time.perf_counter()
        block.sum()
        _finish(device)
        times.append(time.perf_counter() - started)
    return size / min(times)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def weight_bytes(policy_dir: Path) -> dict[str, int]:
    """Bytes of what passes read, out of the headers of a directory's safetensors: "backbone", "heads", "lm_head".

    "backbone" is what a target forward reads: every layer and the lm_head, but no table of embeddings, of which a few
    rows are read, unless it is the lm_head too. "heads" is the MTP layer that an engine serves, the first, without its
    copies of embeddings and lm_head, for which the policy's own stand. Of routed experts those of one token count: a
    batch reads more of them, up to all, so with a mixture of experts the floor of a large batch is far too low.
    """
    config = read_config(policy_dir)
    family, decoder = known_family(config), decoder_config(config)
    sizes, routed = {"backbone": 0, "heads": 0, "lm_head": 0}, {"backbone": 0, "heads": 0}
    embeddings = 0
    for name, size in tensor_bytes(policy_dir).items():
        part = "heads" if family and family.is_head(name, decoder) else "backbone"
        if part == "heads" and (name.endswith(family.shared) or family.layers([name], decoder) - {0}):
            continue
        if EXPERT.search(name):
            routed[part] += size
        elif part == "backbone" and name.endswith("embed_tokens.weight"):
            embeddings += size
        else:
            sizes[part] += size
            sizes["lm_head"] += size if name == "lm_head.weight" else 0
    experts = next((decoder[key] for key in EXPERTS if decoder.get(key)), 1)
    for part, size in routed.items():
        sizes[part] += size * decoder.get("num_experts_per_tok", experts) // experts
    if not sizes["lm_head"]:  # tied
        sizes["lm_head"] = embeddings
        sizes["backbone"] += embeddings
    return sizes


def _of_length(sampling: Sampling, tokens: int) -> Sampling:
    return Sampling(**{**sampling.__dict__, "max_tokens": tokens})
