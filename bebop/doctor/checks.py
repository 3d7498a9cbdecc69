"""The checks that doctor runs; each returns rows of its table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bebop.config import DoctorConfig, RolloutSection
from bebop.doctor import exact
from bebop.engines import ENGINES, RolloutEngine, make_engine
from bebop.errors import EngineError
from bebop.records import Rollout, Sampling
from bebop.spec import RULES

VOCABULARY = 8
PADDING = 5  # embeddings without an id: the engine must not sample them
DEPTH = 3
PROMPT = (1, 2, 3, 4)
RULE_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Row:
    """One line of the table; passed is None for a line that is not a check."""

    check: str
    found: str
    expected: str
    passed: bool | None


def engine_sections(engine: str) -> dict[str, RolloutSection]:
    """The rollout sections to check, by name: chains of three draft tokens with rejection sampling, and a Rheo tree if
    the engine supports it."""
    chain = RolloutSection(
        engine=engine,
        speculation="mtp",
        rule="rejection",
        num_speculative_tokens=DEPTH,
        max_num_seqs=256,
        max_model_len=64,
        kv_cache_gib=0.25,
    )
    if not ENGINES[engine].trees:
        return {f"drafts of {DEPTH}": chain}
    # the full tree has at least 12 nodes; a smaller budget makes the test include pruning
    tree = {"tree": "rheo", "tree_width": 3, "tree_depth": DEPTH, "tree_budget": 7}
    return {f"drafts of {DEPTH}": chain, "Rheo trees of 7": RolloutSection.model_validate(chain.model_dump() | tree)}


def check_rule(seed: int) -> Iterator[Row]:
    """The acceptance rules themselves, by enumeration in float64 on random distributions."""
    generator = torch.Generator().manual_seed(seed)
    for rule in RULES:
        target, draft = (
            [
                torch.softmax(1.5 * torch.randn((VOCABULARY,) * n, generator=generator, dtype=torch.float64), -1)
                for n in (1, 2, 3)
            ]
            for _ in range(2)
        )
        wanted = target[0][:, None, None] * target[1][:, :, None] * target[2]
        distance = float(0.5 * (exact.rule_output(target, draft, RULES[rule]) - wanted).abs().sum())
        yield Row(
            f"rule {rule}, enumerated in float64",
            f"total variation to the target {distance:.1e}",
            f"at most {RULE_TOLERANCE:.0e}",
            distance <= RULE_TOLERANCE,
        )


def check_engine(config: DoctorConfig, work_dir: Path) -> Iterator[Row]:
    """Losslessness and weight sync of the installed engine. A failing engine gives a row, not an exception."""
    from bebop.policies import random_checkpoint

    first = random_checkpoint(work_dir / "first", vocab=VOCABULARY, padding=PADDING, seed=config.seed + 1)
    second = random_checkpoint(work_dir / "second", vocab=VOCABULARY, padding=PADDING, seed=config.seed + 2)
    try:
        for drafts, section in engine_sections(config.doctor.engine).items():
            with make_engine(section, first, seed=config.seed) as engine:
                for temperature in config.doctor.temperatures:
                    yield _lossless(engine, first, temperature, config, f"engine, T = {temperature}, {drafts}")
                if section.tree != "none":
                    continue
                # requests with a seed draw from generators of their own
                coldest = min(config.doctor.temperatures)
                yield _lossless(
                    engine, first, coldest, config, f"engine, T = {coldest}, a seed per request", seeded=True
                )
                yield from _weight_sync(engine, first, second, config)
    except EngineError as error:
        yield Row("engine", str(error), "runs", False)


def _lossless(
    engine: RolloutEngine, policy: Path, temperature: float, config: DoctorConfig, name: str, seeded: bool = False
) -> Row:
    """Chi-square test of samples against their exact joint distribution. If the p-value is below the limit, the test is
    repeated once with new samples, and the second p-value counts. An AL of 1 fails too: nothing was accepted."""
    # ids of the padding have probability 0; an engine that samples one fails
    wanted = np.pad(exact.joint(policy, PROMPT, temperature), (0, PADDING))
    for attempt in (1, 2):
        seeds = [config.seed + attempt * config.doctor.num_requests + i for i in range(config.doctor.num_requests)]
        rollouts, length = _sample(engine, config, temperature, exact.LENGTH, seeds if seeded else None)
        counts = exact.tally((rollout.token_ids for rollout in rollouts), VOCABULARY + PADDING)
        p_value, freedom, _ = exact.chi_square(counts, wanted)
        if p_value >= config.doctor.min_p_value:
            break
    distance = exact.total_variation(counts / counts.sum(), wanted)
    # what the same number of perfect samples would show on average
    noise = float(np.sqrt(2 * wanted * (1 - wanted) / (math.pi * counts.sum())).sum() / 2)
    found = f"total variation {distance:.3f} (by chance {noise:.3f}), AL {length:.2f}"
    return Row(
        name,
        f"p = {p_value:.3g} ({freedom} degrees), {found}",
        f"p at least {config.doctor.min_p_value:g}",
        p_value >= config.doctor.min_p_value and length > 1.0,
    )


def _weight_sync(engine: RolloutEngine, first: Path, second: Path, config: DoctorConfig) -> Iterator[Row]:
    from bebop.mtp import HEAD_PREFIX, checksum

    mine = _tensors(first)
    # a head whose final norm is 0 drafts uniformly, so that its acceptance is known exactly: sum_v min(p_v, 1/V)
    heads = {name: tensor for name, tensor in mine.items() if name.startswith(HEAD_PREFIX)}
    flat = {name: torch.zeros_like(t) if "final_layernorm" in name else t for name, t in heads.items()}
    before, _ = _first_draft_acceptance(engine, config)
    held = engine.update_weights(flat, version=1)
    yield _checksum_row("heads after swap", held.heads, checksum(flat))
    after, drafts = _first_draft_acceptance(engine, config)
    p1, p2, _ = exact.conditionals(first, PROMPT, 1.0)
    wanted = float((p1 * p2.clamp(max=1 / VOCABULARY).sum(-1)).sum())
    z = abs(after - wanted) / math.sqrt(wanted * (1 - wanted) / drafts)
    yield Row(
        "acceptance follows the swapped heads",
        f"{before:.3f} before, {after:.3f} after, exact {wanted:.3f} ({z:.1f} standard errors)",
        "within 4 standard errors of exact",
        z < 4 and before != after,
    )
    theirs = {name: tensor for name, tensor in _tensors(second).items() if not name.startswith(HEAD_PREFIX)}
    held = engine.update_weights(theirs, version=2)
    yield _checksum_row("backbone after swap", held.backbone, checksum(theirs))
    yield _checksum_row("heads untouched by it", held.heads, checksum(flat))
    yield _lossless(engine, second, 1.0, config, "engine follows the swapped backbone")


def _sample(
    engine: RolloutEngine, config: DoctorConfig, temperature: float, length: int, seeds: list[int] | None = None
) -> tuple[list[Rollout], float]:
    """Rollouts of PROMPT and their acceptance length (1.0 if nothing was drafted)."""
    before = engine.counts()
    sampling = Sampling(temperature=temperature, max_tokens=length, logprobs=False, ignore_eos=True)
    rollouts = engine.generate([PROMPT] * config.doctor.num_requests, sampling, seeds=seeds)
    after = engine.counts()
    drafts = after.num_drafts - before.num_drafts
    accepted = sum(after.accepted_per_depth) - sum(before.accepted_per_depth)
    return rollouts, 1.0 + accepted / drafts if drafts else 1.0


def _first_draft_acceptance(engine: RolloutEngine, config: DoctorConfig) -> tuple[float, int]:
    """Share of first draft tokens that were accepted, and their number. Responses have two tokens, so that each request
    verifies exactly once."""
    rollouts, _ = _sample(engine, config, 1.0, 2)
    counts = [rollout.counts for rollout in rollouts if rollout.counts is not None]
    drafts = sum(count.num_drafts for count in counts)
    accepted = sum(count.accepted_per_depth[0] for count in counts if count.accepted_per_depth)
    return (accepted / drafts if drafts else 0.0), max(drafts, 1)


def _checksum_row(check: str, held: str, sent: str) -> Row:
    return Row(check, f"engine {held}, trainer {sent}", "equal checksums", held == sent)


def _tensors(policy: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(policy / "model.safetensors")
