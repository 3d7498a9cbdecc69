"""The table of the story from the runs' own files; exit code 1 if a run shows something else than it must.

usage: table.py FOLDER, the folder with the runs of run.sh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bebop.monitor import read_steps

PROBS_DIFF_LIMIT = 1e-5  # float32, on-policy samples


def main(folder: Path) -> int:
    print("| stage | result |\n|---|---|")
    sft = _summary(folder / "sft")
    before, after = sft["acceptance_length_before"], sft["acceptance_length"]
    print(
        f"| sft | scored AL {before:.3f} → {after:.3f} ± {sft['acceptance_length_se']:.3f}; "
        f"text {sft['text_s']:.0f} s, training {sft['train_s']:.0f} s |"
    )
    wrong = [f"sft: AL {before:.3f} → {after:.3f}"] * (after <= before)
    wrong += _agreement("eval", _summary(folder / "eval"))
    plan = _summary(folder / "planner")
    chosen = ", ".join(
        f"k = {row['k']} at batch size {row['batch_size']} ({row['speedup']:.2f} of plain decoding)"
        for row in plan["plan"]
        if row["chosen"]
    )
    print(f"| planner | {chosen} |")
    wrong += _grpo("grpo, sync", folder / "sync", steps=3)
    wrong += _grpo("grpo, colocate_async, killed after step 2 and resumed", folder / "async", steps=4)
    wrong += _agreement("eval of the last checkpoint", _summary(folder / "eval_after"))
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return int(bool(wrong))


def _summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def _agreement(stage: str, summary: dict[str, Any]) -> list[str]:
    """A row of observed against predicted acceptance; what is wrong with it."""
    every = summary["tasks"]["all"]
    found, scored, error = every["agreement"], every["scored"]["acceptance_length"], every["acceptance_length_se"]
    pairs = zip(found["observed"], found["predicted"], found["half_width_99"], strict=True)
    depths = "; ".join(f"{a:.3f} and {b:.3f} ± {half:.3f}" for a, b, half in pairs)
    print(
        f"| {stage} | AL observed {every['acceptance_length']:.3f}, scored {scored:.3f} ± {error:.3f}; "
        "first 1, 2, 3 draft tokens all accepted, observed and predicted: "
        f"{depths}; reward {every['reward_mean']:.2f} |"
    )
    return [] if found["agrees"] else [f"{stage}: observed acceptance is not the predicted one"]


def _grpo(stage: str, run_dir: Path, steps: int) -> list[str]:
    """A row of a GRPO run; what is wrong with it."""
    records, wrong = read_steps(run_dir), []
    diffs = [record.probs_diff_max for record in records if record.probs_diff_max is not None]
    equal = all(record.heads_checksum_engine == record.heads_checksum_trainer for record in records)
    lengths = ", ".join(f"{record.acceptance_length:.2f}" for record in records)
    print(
        f"| {stage} | {len(records)} steps; AL {lengths}; `probs_diff_max` {max(diffs):.1e} in {len(diffs)} on-policy "
        f"steps; heads {'equal' if equal else 'NOT equal'} after every sync |"
    )
    if [record.step for record in records] != list(range(1, steps + 1)):
        wrong.append(f"{stage}: steps {[record.step for record in records]}, expected 1 to {steps}")
    if len({record.backbone_checksum for record in records}) != steps:
        wrong.append(f"{stage}: the policy did not move at every step")
    if not equal or max(diffs) > PROBS_DIFF_LIMIT:
        wrong.append(f"{stage}: the engine serves other weights than the trainer has")
    return wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
