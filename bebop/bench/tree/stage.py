"""bench tree: acceptance length and tokens per second of chains and draft trees, all on the torch engine.

Every variant answers the same prompts with the same seeds. For each batch of prompts the variants run one after the
other, in an order that changes from batch to batch, so that a machine that slows down slows all of them. Responses have
no fixed length.

Acceptance length is pooled, r = 1 + accepted / drafts over all rounds; a round is a target forward with a draft. Rounds
of one text are alike, so its standard error counts prompts: prompt i moves r by d_i = (accepted_i - (r - 1) drafts_i) /
mean(drafts), and the error is std(d) / sqrt(prompts). The error of a difference takes d_i - d'_i: paired by prompt.

Trees are scored too, see `bebop.bench.tree.score`: expected tokens of a round at the same places of the same texts.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from bebop.bench import conditions, policy_and_prompts, spread, write_rows
from bebop.bench.tree import plots as tree_plots
from bebop.bench.tree.score import TreeScorer
from bebop.config import BenchConfig, RolloutSection
from bebop.data.self_distill import rollout_sampling
from bebop.engines import RolloutEngine, make_engine
from bebop.errors import ConfigError
from bebop.records import Rollout
from bebop.spec import RULES

RRSW_LEADS = 1  # the m at which RRSw is compared
CLEAR = 2.0  # standard errors above which a gain over TopK counts as one


@dataclass(frozen=True)
class Variant:
    """A way of drafting. leads: RheoSampling's and RRSw's m, else None."""

    name: str
    method: str
    leads: int | None
    rollout: RolloutSection


@dataclass
class Tally:
    """What one variant did at one temperature and batch size. accepted, drafts [prompts]; tokens, seconds [repeats]."""

    accepted: np.ndarray
    drafts: np.ndarray
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds_s: float = 0.0  # of rounds, prompts' passes left out
    rules_s: float = 0.0  # of these, in growing and verifying drafts
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # prompt -> its last response

    @property
    def acceptance_length(self) -> float:
        return 1.0 + self.accepted.sum() / max(self.drafts.sum(), 1)

    @property
    def influence(self) -> np.ndarray:
        """d_i of the module's docstring, [prompts]."""
        if not self.drafts.sum():
            return np.zeros(len(self.drafts))
        return (self.accepted - (self.acceptance_length - 1.0) * self.drafts) / self.drafts.mean()

    @property
    def speeds(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


SHOWN = {  # title in the console -> key
    "T": "temperature",
    "batch": "batch_size",
    "variant": "variant",
    "AL": "acceptance_length",
    "±": "acceptance_length_error",
    "over topk": "gain",
    "± paired": "gain_error",
    "scored": "scored",
    "scored over topk": "scored_gain",
    "± scored": "scored_gain_error",
    "tokens/s": "tokens_per_s",
    "speed-up": "speedup",
    "surviving": "surviving",
    "rules": "rules_share",
    "greedy text": "same_text",
}


def run(config: BenchConfig, run_dir: Path) -> dict[str, Any]:
    """Measure, print a table, write tree.csv, two plots and summary.json to run_dir; returns the summary."""
    kinds = variants(config)
    prompts, summary = policy_and_prompts(config, config.bench.tree.num_prompts)
    policy_dir = Path(summary["policy"])
    engines: dict[str, RolloutEngine] = {}
    rows: list[dict[str, Any]] = []
    try:
        for kind in tqdm(kinds, desc="engines"):
            engines[kind.name] = make_engine(kind.rollout, policy_dir, seed=config.seed, dtype=config.model.dtype)
        scored: dict[float, dict[str, Tally]] = {}
        for size in config.bench.batch_sizes:
            for temperature in config.bench.tree.temperatures:
                tallies = _measure(config, engines, prompts, size, temperature)
                if temperature not in scored:
                    texts = [[*prompt, *next(iter(tallies.values())).texts[i]] for i, prompt in enumerate(prompts)]
                    scored[temperature] = _score(config, kinds, policy_dir, prompts, texts, temperature)
                rows += [_row(config, kind, tallies, scored[temperature], size, temperature) for kind in kinds]
    finally:
        for engine in engines.values():
            engine.close()
    plots = [str(path) for path in tree_plots.write(rows, run_dir)]
    return write_rows(run_dir, "tree.csv", rows, SHOWN, summary | {"plots": plots})


def variants(config: BenchConfig) -> list[Variant]:
    """What to compare, in the order of the table; each as a rollout section of the torch engine."""
    wanted, base = config.bench.tree, config.rollout.model_dump() | {"engine": "torch", "speculation": "mtp"}
    base["max_num_seqs"] = max(config.bench.batch_sizes)  # every engine's cache is there at once
    most = config.rollout.tree_width - 1
    for leads in [*wanted.leads, RRSW_LEADS]:
        if not 0 <= leads <= most:
            raise ConfigError(f"bench.tree.leads {leads}: expected 0 to rollout.tree_width - 1 = {most}")
    found = []

    def add(name: str, method: str, leads: int | None = None, **keys: Any) -> None:
        found.append(Variant(name, method, leads, RolloutSection.model_validate(base | keys)))

    for method in wanted.methods:
        if method == "plain":
            add("plain", method, speculation="none", tree="none")
        elif method in RULES:
            add(method, method, tree="none", rule=method)
        elif method == "topk":
            add("topk", method, tree="topk")
        elif method == "rrsw":
            add(f"rrsw m={RRSW_LEADS}", method, RRSW_LEADS, tree="rrsw", tree_leads=RRSW_LEADS)
        else:
            for leads in wanted.leads:
                add(f"rheo m={leads}", method, leads, tree="rheo", tree_leads=leads)
    return found


def _measure(
    config: BenchConfig, engines: dict[str, RolloutEngine], prompts: list[list[int]], size: int, temperature: float
) -> dict[str, Tally]:
    """The tally of every variant; a first, unmeasured turn warms each up."""
    sampling = replace(rollout_sampling(config), temperature=temperature)
    tallies = {name: Tally(np.zeros(len(prompts)), np.zeros(len(prompts))) for name in engines}
    for engine in engines.values():
        engine.generate(prompts[:size], sampling, seeds=list(range(len(prompts[:size]))))
    starts = list(range(0, len(prompts), size))
    progress = tqdm(total=config.bench.repeats * len(starts), desc=f"T={temperature:g}, batch {size}")
    for repeat in range(config.bench.repeats):
        for tally in tallies.values():
            tally.tokens.append(0)
            tally.seconds.append(0.0)
        for turn, start in enumerate(starts):
            names, first = list(engines), (turn + repeat) % len(engines)
            for name in names[first:] + names[:first]:
                chosen = range(start, min(start + size, len(prompts)))
                seeds = [_seed(config.seed, repeat, i) for i in chosen]
                engines[name].take_steps()
                began = time.perf_counter()
                answers = engines[name].generate([prompts[i] for i in chosen], sampling, seeds=seeds)
                seconds, steps = time.perf_counter() - began, engines[name].take_steps()
                tallies[name].rounds_s += sum(step.decoding_s or 0.0 for step in steps)
                tallies[name].rules_s += sum(step.rules_s or 0.0 for step in steps)
                _count(tallies[name], dict(zip(chosen, answers, strict=True)), seconds)
            progress.update()
    progress.close()
    return tallies


def _score(
    config: BenchConfig,
    kinds: list[Variant],
    policy_dir: Path,
    prompts: list[list[int]],
    texts: list[list[int]],
    temperature: float,
) -> dict[str, Tally]:
    """The trees' expected rounds at places of the responses, drawn by the config's seed; nothing if none is asked."""
    trees = [kind for kind in kinds if kind.rollout.tree != "none"]
    if not config.bench.tree.score_positions or not trees:
        return {}
    tallies = {kind.name: Tally(np.zeros(len(prompts)), np.zeros(len(prompts))) for kind in trees}
    scorer = TreeScorer(policy_dir, getattr(torch, config.model.dtype), [kind.rollout for kind in trees])
    for i, (prompt, text) in enumerate(zip(tqdm(prompts, desc=f"T={temperature:g}, scored"), texts, strict=True)):
        places = np.arange(len(prompt) - 1, len(text) - 1)
        chosen = np.random.default_rng(config.seed + i).permutation(places)[: config.bench.tree.score_positions]
        expected = scorer.score(text, sorted(chosen.tolist()), temperature) - 1.0
        for kind, row in zip(trees, expected, strict=True):
            tallies[kind.name].accepted[i], tallies[kind.name].drafts[i] = float(row.sum()), len(chosen)
    return tallies


def _seed(seed: int, repeat: int, prompt: int) -> int:
    return seed * 1_000_000_007 + repeat * 1_000_003 + prompt


def _count(tally: Tally, answers: dict[int, Rollout], seconds: float) -> None:
    tally.seconds[-1] += seconds
    for prompt, answer in answers.items():
        tally.tokens[-1] += len(answer.token_ids)
        tally.texts[prompt] = answer.token_ids
        if answer.counts is not None:
            tally.accepted[prompt] += sum(answer.counts.accepted_per_depth)
            tally.drafts[prompt] += answer.counts.num_drafts


def _row(
    config: BenchConfig,
    kind: Variant,
    tallies: dict[str, Tally],
    scored: dict[str, Tally],
    batch_size: int,
    temperature: float,
) -> dict[str, Any]:
    """One line of tree.csv; errors are standard errors.

    gain: acceptance length above TopK's, paired by prompt; surviving: (speed / TopK's - 1) / (acceptance length /
    TopK's - 1), the share of the gain that is left in tokens per second; None where the gain is within its error.
    scored: expected tokens of a round at given positions, and its gain over TopK, paired too; trees only. same_text: at
    temperature 0, the share of prompts whose text is plain decoding's. rules_share: of a round's time, what growing and
    verifying the draft takes, the model's passes left out; None on a GPU.
    """
    tally, topk, plain = tallies[kind.name], tallies.get("topk"), tallies.get("plain")
    num, speed, is_tree = len(tally.drafts), statistics.median(tally.speeds), kind.rollout.tree != "none"
    gain, gain_error = _gain(tally, topk if is_tree else None)
    surviving = same = None
    if gain is not None and gain > CLEAR * gain_error:
        faster = speed / statistics.median(topk.speeds) - 1.0
        surviving = faster / (tally.acceptance_length / topk.acceptance_length - 1.0)
    if temperature == 0 and plain is not None:
        same = sum(tally.texts[i] == plain.texts[i] for i in range(num)) / num
    mine = scored.get(kind.name)
    scored_gain, scored_gain_error = _gain(mine, scored.get("topk"))
    return {
        "temperature": temperature,
        "batch_size": batch_size,
        "variant": kind.name,
        "method": kind.method,
        "leads": kind.leads,
        "acceptance_length": tally.acceptance_length,
        "acceptance_length_error": error_of(tally.influence),
        "gain": gain,
        "gain_error": gain_error,
        "scored": mine.acceptance_length if mine else None,
        "scored_error": error_of(mine.influence) if mine else None,
        "scored_gain": scored_gain,
        "scored_gain_error": scored_gain_error,
        "scored_positions": int(mine.drafts.sum()) if mine else 0,
        **spread(tally.speeds),
        "speedup": speed / statistics.median(plain.speeds) if plain is not None else None,
        "surviving": surviving,
        "rules_share": tally.rules_s / tally.rounds_s if tally.rounds_s else None,
        "same_text": same,
        "depth": kind.rollout.draft_depth,
        **{key: getattr(kind.rollout, f"tree_{key}") if is_tree else None for key in ("width", "budget", "support")},
        "prompts": num,
        "rounds": int(tally.drafts.sum()),
        "response_tokens": sum(tally.tokens),
        **conditions(config),
    }


def _gain(tally: Tally | None, base: Tally | None) -> tuple[float | None, float | None]:
    """Acceptance length above the base's and its error, paired by prompt; None where one of the two is missing."""
    if tally is None or base is None:
        return None, None
    return tally.acceptance_length - base.acceptance_length, error_of(tally.influence - base.influence)


def error_of(influence: np.ndarray) -> float:
    """Standard error of a mean over prompts; nan for a single one."""
    return float(influence.std(ddof=1) / len(influence) ** 0.5) if len(influence) > 1 else float("nan")
