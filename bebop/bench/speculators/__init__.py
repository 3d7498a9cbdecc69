"""bench speculators: heads trained by bebop against heads trained by speculators 0.9.0, by one scorer.

Equal on both sides: the frozen policy (a family that both support), the heads that training starts from, the policy's
own text and its order in packed batches, optimizer steps, draft depth, float32, and the scorer. Each side keeps its own
loss, optimizer, schedule and weight decay, and gets the same learning rates to try; speculators gets both of its
optimizers, and at its best its depths weighted alike too. What a side tries is chosen on the first half of the held-out
documents, and reported on the second. bebop with speculators' loss (hard_ce) tells what the loss does from what is
left: attention as the engine drafts, and optimizer.

Then the engine drafts with the chosen heads of both, and `memory` measures a training step of each.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bebop.acceptance import score_batches
from bebop.backbone import load_backbone
from bebop.bench.speculators import memory, rival
from bebop.bench.speculators.policy import shared_policy
from bebop.bench.speculators.scored import Pooled, Scored, by_document
from bebop.config import BenchConfig, Loss, Model, Sft, SftConfig
from bebop.data import load_tokenizer, make_prompts
from bebop.data.prompts import encode_prompts
from bebop.data.self_distill import rollout_sampling, sample_all
from bebop.engines import make_engine
from bebop.monitor import print_table, write_summary
from bebop.mtp import checkpoint_checksums, load_heads
from bebop.sft.dataset import TextData
from bebop.sft.stage import CHECKPOINT, RESULT, train
from bebop.sft.training_sequences import prepare_text
from bebop.store.environment import device_name
from bebop.store.files import cache_home

CONTROL = "hard_ce"  # speculators' loss, in bebop


@dataclass(frozen=True)
class Entry:
    """One training run. side: bebop, speculators, or bebop with speculators' loss."""

    side: str
    options: str
    checkpoint: Path
    chosen_by: Scored  # on the first half of the held-out documents
    reported: Scored  # on the second


def run(config: BenchConfig, run_dir: Path) -> dict[str, Any]:
    """Train, score, sample and measure; writes heads.csv, memory.csv and summary.json. Returns the summary.

    Raises ConfigError without speculators 0.9.0, or for a policy that only one side can train.
    """
    rival.require()
    policy = shared_policy(config.model, config.seed)
    base = _sft_config(config, policy)
    text_dir, text = prepare_text(base, policy, cache_home())
    bench = _Comparison(config, base, policy, text_dir, run_dir)
    entries = bench.entries()
    sides = dict.fromkeys(entry.side for entry in entries)
    best = {side: max((entry for entry in entries if entry.side == side), key=_dev) for side in sides}
    sampled = {side: _sampled(config, best[side].checkpoint) for side in ("bebop", "speculators")}
    spec = config.bench.speculators
    peaks = memory.measure(
        spec.memory_vocab_sizes, anchors=spec.memory_anchors, depth=base.sft.depth, width=spec.memory_width
    )
    rows = [_row(entry, entry is best[entry.side]) for entry in entries]
    _write(run_dir / "heads.csv", rows)
    _write(run_dir / "memory.csv", memory.as_rows(peaks))
    print_table(rows)
    print_table(memory.as_rows(peaks))
    gain, gain_se = best["bebop"].reported.length.gain(best["speculators"].reported.length)
    engine_gain, engine_gain_se = sampled["bebop"].gain(sampled["speculators"])
    summary = {
        "policy": str(policy),
        "text": text,
        "temperature": config.rollout.temperature,
        "before": _row(bench.before, False),
        "rows": rows,
        "scored_gain": gain,
        "scored_gain_se": gain_se,
        "sampled": {side: {"acceptance_length": s.value, "se": s.error} for side, s in sampled.items()},
        "sampled_gain": engine_gain,
        "sampled_gain_se": engine_gain_se,
        "memory": memory.as_rows(peaks),
    }
    write_summary(run_dir, summary)
    print(describe(summary), flush=True)
    return summary


def describe(summary: dict[str, Any]) -> str:
    """The comparison in three lines."""
    of = {side: f"{s['acceptance_length']:.3f} +- {s['se']:.3f}" for side, s in summary["sampled"].items()}
    chosen = {row["side"]: row for row in summary["rows"] if row["chosen"]}
    scored = {side: f"{row['AL']:.3f} +- {row['AL se']:.3f} ({row['options']})" for side, row in chosen.items()}
    return (
        f"scored AL at T = {summary['temperature']:g}: bebop {scored['bebop']}, speculators {scored['speculators']}; "
        f"gain {summary['scored_gain']:+.3f} +- {summary['scored_gain_se']:.3f} on the same documents\n"
        f"sampled by the engine: bebop {of['bebop']}, speculators {of['speculators']}; "
        f"gain {summary['sampled_gain']:+.3f} +- {summary['sampled_gain_se']:.3f}"
    )


class _Comparison:
    def __init__(self, config: BenchConfig, base: SftConfig, policy: Path, text_dir: Path, run_dir: Path) -> None:
        self.config, self.base, self.policy, self.text_dir, self.run_dir = config, base, policy, text_dir, run_dir
        sft = base.sft
        backbone = load_backbone(policy, dtype=torch.float32, device=device_name())
        self.weights = (backbone.embed_weight.float(), backbone.lm_head_weight.float())
        self.data = TextData(
            text_dir,
            backbone,
            depth=sft.depth,
            batch_tokens=sft.batch_tokens,
            seed=base.seed,
            cache_hidden=base.data.cache_hidden,
            policy=checkpoint_checksums(policy).backbone,
        )
        self.heldout = list(self.data.heldout())
        self.before = self._entry("before", "", policy)

    def entries(self) -> list[Entry]:
        """All training runs of all sides."""
        lrs = self.config.bench.speculators.lrs
        runs: list[tuple[str, str, Callable[[Path], Path]]] = []
        control = self.base.loss.model_copy(update={"name": CONTROL, "warmup": None})
        for optimizer in rival.OPTIMIZERS:
            for lr in lrs:
                name = f"{optimizer} lr {lr:g}"
                runs.append(("bebop", name, self._bebop(lr, optimizer, self.base.loss)))
                runs.append((f"bebop {CONTROL}", name, self._bebop(lr, optimizer, control)))
        options = [rival.Options(lr, optimizer) for optimizer in rival.OPTIMIZERS for lr in lrs]
        runs += [("speculators", each.name, self._speculators(each)) for each in options]
        found = [self._train(*each) for each in tqdm(runs, desc="heads")]
        theirs = [entry for entry in found if entry.side == "speculators"]
        best = options[max(range(len(theirs)), key=lambda i: _dev(theirs[i]))]
        alike = rival.Options(best.lr, best.optimizer, beta=1.0)
        return [*found, self._train("speculators", alike.name, self._speculators(alike))]

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
                sft = self.base.sft.model_copy(update={"lr": lr, "optimizer": optimizer})
                train(self.base.model_copy(update={"sft": sft, "loss": loss}), self.policy, self.text_dir, folder)
            return folder / CHECKPOINT

        return make

    def _speculators(self, options: rival.Options) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            dest = folder / CHECKPOINT
            if not dest.exists():
                sft, hidden = self.base.sft, self.data.hidden
                order = [batch for step in range(sft.steps) for batch in self.data.stream.step(step, 1, 1)]
                samples = [rival.sample(indexed, hidden.batch(indexed)) for indexed in order]
                rival.train(self.policy, samples, sft.depth, options, self.base.seed, dest)
            return dest

        return make


def _sft_config(config: BenchConfig, policy: Path) -> SftConfig:
    spec = config.bench.speculators
    rollout = config.rollout
    return SftConfig(
        model=Model(name="hf", path=policy, dtype="float32", mtp_init=config.model.mtp_init),
        data=config.data,
        # by its name, since bebop takes heads that came with a policy for trained ones
        loss=Loss(warmup="lk"),
        sft=Sft(
            depth=rollout.num_speculative_tokens,
            steps=spec.steps,
            batch_tokens=spec.batch_tokens,
            eval_every=spec.steps,
            save_every=spec.steps,
        ),
        rollout=rollout,
        seed=config.seed,
    )


def _sampled(config: BenchConfig, checkpoint: Path) -> Pooled:
    """Acceptance length of the engine, as a ratio over requests; the same prompts and seeds for every checkpoint."""
    tokenizer = load_tokenizer(checkpoint)
    prompts = make_prompts(config.data.tasks, config.data.num_heldout, config.seed, "eval")
    ids = [ids for _, ids in encode_prompts(prompts, config.data, tokenizer)]
    with make_engine(config.rollout, checkpoint, seed=config.seed, dtype="float32") as engine:
        rollouts = sample_all(engine, ids, rollout_sampling(config), title="engine")
    counts = [r.counts for r in rollouts if r.counts is not None and r.counts.num_drafts]
    drafts = torch.tensor([c.num_drafts for c in counts], dtype=torch.float64)
    return Pooled(drafts + torch.tensor([sum(c.accepted_per_depth) for c in counts]), drafts)


def _dev(entry: Entry) -> float:
    return entry.chosen_by.length.value


def _row(entry: Entry, chosen: bool) -> dict[str, Any]:
    scored = entry.reported
    return {
        "side": entry.side,
        "options": entry.options,
        "chosen": chosen,
        "AL to choose by": round(_dev(entry), 4),
        "AL": round(scored.length.value, 4),
        "AL se": round(scored.length.error, 4),
        **{f"accepted {j}": round(each.value, 4) for j, each in enumerate(scored.accepted, 1)},
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
