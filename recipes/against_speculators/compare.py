"""Heads trained by bebop against heads trained by speculators 0.9.0, compared by one scorer. See README.md.

Equal on both sides: the frozen policy (of a family that both support), the heads that training starts from, the text
that the policy sampled and its order in packed batches, optimizer steps, draft depth, float32, and the scorer. Each
side keeps its own loss, optimizers, learning-rate schedule and weight decay, and tries the same learning rates;
speculators runs its best setting once more with equal weights for all depths. The settings of a side are chosen on
the first half of the held-out documents and reported on the second. bebop with speculators' loss (hard_ce) separates
the effect of the loss from that of the attention and the optimizer.

Then the engine drafts with the chosen heads of both sides, and memory.py measures a training step of each.

    python compare.py [--lrs 0.01,0.02] [--memory-vocab-sizes 32768] [--memory-anchors N] [--memory-width D] [overrides]

overrides: of `bebop sft`, whose config this is, on top of recipe.yaml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import baseline
import memory
import torch
from documents import Pooled, Scored, by_document
from shared_policy import shared_policy
from tqdm import tqdm

from bebop.acceptance import score_batches
from bebop.backbone import load_backbone
from bebop.cli import compose
from bebop.config import Loss, Model, SftConfig, check
from bebop.config.overrides import parse
from bebop.data import load_tokenizer, make_prompts
from bebop.data.prompts import encode_prompts
from bebop.data.self_distill import rollout_sampling, sample_all
from bebop.engines import make_engine
from bebop.errors import BebopError
from bebop.mtp import load_heads
from bebop.mtp.content import PolicyContent
from bebop.sft.dataset import TextData
from bebop.sft.stage import CHECKPOINT, RESULT, train
from bebop.sft.training_sequences import prepare_text
from bebop.store.caches import name_of
from bebop.store.environment import device_name
from bebop.store.files import cache_home
from bebop.store.run_folder import begin, new_folder, write_summary
from bebop.store.tables import print_table, write_csv

NAME = "against_speculators"
CONTROL = "hard_ce"  # speculators' loss, in bebop


@dataclass(frozen=True)
class Entry:
    """One training run. side: bebop, speculators, or bebop with speculators' loss."""

    side: str
    options: str
    checkpoint: Path
    chosen_by: Scored  # on the first half of the held-out documents
    reported: Scored  # on the second


def main(words: Sequence[str]) -> None:
    options, overrides = _options().parse_known_args(words)
    config = check("sft", compose("sft", parse("sft", [f"recipe={NAME}", *overrides])))
    assert isinstance(config, SftConfig)
    run_dir = (config.run_dir or new_folder(NAME)).resolve()
    with begin(run_dir, NAME, {**config.model_dump(mode="json"), **vars(options)}, free=("run_dir", "logger")):
        run(config, options, run_dir)
    print(run_dir)


def _options() -> argparse.ArgumentParser:
    def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda word: [kind(part) for part in word.split(",")]

    parser = argparse.ArgumentParser(description="Heads by bebop against heads by speculators.", allow_abbrev=False)
    parser.add_argument("--lrs", type=numbers(float), default=[0.01, 0.02, 0.04], help="learning rates of both sides")
    sizes = {"type": numbers(int), "default": [32768, 151936]}
    parser.add_argument("--memory-vocab-sizes", **sizes, help="vocabulary sizes at which memory is measured")
    parser.add_argument("--memory-anchors", type=int, default=2048, help="anchors of that training step")
    parser.add_argument("--memory-width", type=int, default=64, help="width of its hidden states")
    return parser


def run(config: SftConfig, options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Train, score, sample and measure; writes heads.csv, memory.csv and summary.json. Returns the summary.

    Raises ConfigError without speculators 0.9.0, or for a policy that only one side can train.
    """
    baseline.require()
    policy = shared_policy(config.model, config.seed)
    sft = config.sft.model_copy(update={"eval_every": config.sft.steps, "save_every": config.sft.steps})
    model = Model(name="hf", path=policy, dtype="float32", mtp_init=config.model.mtp_init)
    config = config.model_copy(update={"model": model, "sft": sft})
    text_dir, text = prepare_text(config, policy, cache_home())
    comparison = Comparison(config, options.lrs, policy, text_dir, run_dir)
    entries = comparison.entries()
    sides = dict.fromkeys(entry.side for entry in entries)
    best = {side: max((entry for entry in entries if entry.side == side), key=_chosen_by) for side in sides}
    observed = {side: _observed(config, best[side].checkpoint) for side in ("bebop", "speculators")}
    peaks = memory.measure(
        options.memory_vocab_sizes, anchors=options.memory_anchors, depth=sft.depth, width=options.memory_width
    )
    rows = [_row(entry, entry is best[entry.side]) for entry in entries]
    write_csv(run_dir / "heads.csv", rows)
    write_csv(run_dir / "memory.csv", memory.as_rows(peaks))
    print_table(rows)
    print_table(memory.as_rows(peaks))
    gain, gain_se = best["bebop"].reported.length.gain(best["speculators"].reported.length)
    observed_gain, observed_gain_se = observed["bebop"].gain(observed["speculators"])
    summary = {
        "policy": str(policy),
        "text": text,
        "temperature": config.rollout.temperature,
        "before": _row(comparison.before, False),
        "rows": rows,
        "scored_gain": gain,
        "scored_gain_se": gain_se,
        "observed": {side: {"acceptance_length": s.value, "se": s.error} for side, s in observed.items()},
        "observed_gain": observed_gain,
        "observed_gain_se": observed_gain_se,
        "memory": memory.as_rows(peaks),
    }
    write_summary(run_dir, summary)
    print(describe(summary), flush=True)
    return summary


def describe(summary: dict[str, Any]) -> str:
    """The comparison in two lines."""
    of = {side: f"{s['acceptance_length']:.3f} ± {s['se']:.3f}" for side, s in summary["observed"].items()}
    chosen = {row["side"]: row for row in summary["rows"] if row["chosen"]}
    scored = {side: f"{row['AL']:.3f} ± {row['AL se']:.3f} ({row['options']})" for side, row in chosen.items()}
    return (
        f"scored AL at T = {summary['temperature']:g}: bebop {scored['bebop']}, speculators {scored['speculators']}; "
        f"gain {summary['scored_gain']:+.3f} ± {summary['scored_gain_se']:.3f} on the same documents\n"
        f"observed in the engine: bebop {of['bebop']}, speculators {of['speculators']}; "
        f"gain {summary['observed_gain']:+.3f} ± {summary['observed_gain_se']:.3f}"
    )


class Comparison:
    """The training runs of all sides on one policy and text."""

    def __init__(self, config: SftConfig, lrs: Sequence[float], policy: Path, text_dir: Path, run_dir: Path) -> None:
        self.config, self.lrs, self.policy, self.text_dir, self.run_dir = config, lrs, policy, text_dir, run_dir
        sft = config.sft
        backbone = load_backbone(policy, dtype=torch.float32, device=device_name())
        self.weights = (backbone.embed_weight.float(), backbone.lm_head_weight.float())
        self.data = TextData(
            text_dir,
            backbone,
            depth=sft.depth,
            batch_tokens=sft.batch_tokens,
            seed=config.seed,
            cache_hidden=config.data.cache_hidden,
            policy=name_of(PolicyContent(policy)),
        )
        self.heldout = list(self.data.heldout())
        self.before = self._entry("before", "", policy)

    def entries(self) -> list[Entry]:
        """All training runs of all sides."""
        runs: list[tuple[str, str, Callable[[Path], Path]]] = []
        control = self.config.loss.model_copy(update={"name": CONTROL, "warmup": None})
        for optimizer in baseline.OPTIMIZERS:
            for lr in self.lrs:
                name = f"{optimizer} lr {lr:g}"
                runs.append(("bebop", name, self._bebop(lr, optimizer, self.config.loss)))
                runs.append((f"bebop {CONTROL}", name, self._bebop(lr, optimizer, control)))
        options = [baseline.Options(lr, optimizer) for optimizer in baseline.OPTIMIZERS for lr in self.lrs]
        runs += [("speculators", each.name, self._speculators(each)) for each in options]
        entries = [self._train(*each) for each in tqdm(runs, desc="heads")]
        theirs = [entry for entry in entries if entry.side == "speculators"]
        best = options[max(range(len(theirs)), key=lambda i: _chosen_by(theirs[i]))]
        even = baseline.Options(best.lr, best.optimizer, beta=1.0)
        return [*entries, self._train("speculators", even.name, self._speculators(even))]

    def _train(self, side: str, options: str, make: Callable[[Path], Path]) -> Entry:
        return self._entry(side, options, make(self.run_dir / f"{side} {options}".replace(" ", "_")))

    def _entry(self, side: str, options: str, checkpoint: Path) -> Entry:
        head = load_heads(checkpoint)
        if head is None:
            raise RuntimeError(f"{checkpoint}: no heads in it after training")
        head, temperature = head.float().to(self.weights[0].device), self.config.rollout.temperature
        scored = by_document(score_batches(head, self.heldout, *self.weights, temperature=temperature))
        half = len(scored.length.count) // 2
        return Entry(side, options, checkpoint, scored.part(slice(half)), scored.part(slice(half, None)))

    def _bebop(self, lr: float, optimizer: str, loss: Loss) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            if not (folder / RESULT).exists():
                folder.mkdir(parents=True, exist_ok=True)
                sft = self.config.sft.model_copy(update={"lr": lr, "optimizer": optimizer})
                train(self.config.model_copy(update={"sft": sft, "loss": loss}), self.policy, self.text_dir, folder)
            return folder / CHECKPOINT

        return make

    def _speculators(self, options: baseline.Options) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            dest = folder / CHECKPOINT
            if not dest.exists():
                sft, hidden = self.config.sft, self.data.hidden
                order = [batch for step in range(sft.steps) for batch in self.data.stream.step(step, 1, 1)]
                samples = [baseline.sample(indexed, hidden.batch(indexed)) for indexed in order]
                baseline.train(self.policy, samples, sft.depth, options, self.config.seed, dest)
            return dest

        return make


def _observed(config: SftConfig, checkpoint: Path) -> Pooled:
    """Acceptance length of the engine, as a ratio over requests; the same prompts and seeds for every checkpoint."""
    tokenizer = load_tokenizer(checkpoint)
    prompts = make_prompts(config.data.tasks, config.data.num_heldout, config.seed, "eval")
    ids = [ids for _, ids in encode_prompts(prompts, config.data.max_prompt_tokens, tokenizer)]
    with make_engine(config.rollout, checkpoint, seed=config.seed, dtype="float32") as engine:
        rollouts = sample_all(engine, ids, rollout_sampling(config), title="engine")
    counts = [r.counts for r in rollouts if r.counts is not None and r.counts.num_drafts]
    drafts = torch.tensor([c.num_drafts for c in counts], dtype=torch.float64)
    return Pooled(drafts + torch.tensor([sum(c.accepted_per_depth) for c in counts]), drafts)


def _chosen_by(entry: Entry) -> float:
    return entry.chosen_by.length.value


def _row(entry: Entry, chosen: bool) -> dict[str, Any]:
    scored = entry.reported
    return {
        "side": entry.side,
        "options": entry.options,
        "chosen": chosen,
        "AL to choose by": round(_chosen_by(entry), 4),
        "AL": round(scored.length.value, 4),
        "AL se": round(scored.length.error, 4),
        **{f"accepted {j}": round(each.value, 4) for j, each in enumerate(scored.accepted, 1)},
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BebopError as error:
        sys.exit(f"compare.py: error: {error}")
