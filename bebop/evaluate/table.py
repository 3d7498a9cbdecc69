"""The result of `eval` as rows: one per task and depth, raw counts beside every ratio.

sampled: the engine's counters, pooled over requests; its drafts start where the last one ended, so a position's weight
falls with its acceptance. scored: the heads re-run on the sampled text, every position alike. They agree up to that
weighting and to the standard error, unless the engine serves other heads than the checkpoint has.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bebop.records import DraftCounts
from bebop.sft.scoring import Acceptance


@dataclass(frozen=True)
class Row:
    """Draft depth `depth` of one task. Probabilities are of the first `depth` drafts all accepted."""

    task: str
    depth: int
    num_drafts: int | None  # the engine's; None: it drafts less deep, or not at all
    num_accepted: int | None
    sampled: float | None  # num_accepted / num_drafts, under the rollout's rule
    scored: float  # under rejection sampling
    scored_se: float
    scored_target_only: float
    num_anchors: int


def rows_of(task: str, counts: DraftCounts | None, scored: Acceptance) -> list[Row]:
    """[K] rows of one task, K the depth that was scored."""
    accepted = counts.accepted_per_depth if counts and counts.num_drafts else ()
    return [
        Row(
            task=task,
            depth=j + 1,
            num_drafts=counts.num_drafts if counts and j < len(accepted) else None,
            num_accepted=accepted[j] if j < len(accepted) else None,
            sampled=accepted[j] / counts.num_drafts if counts and j < len(accepted) else None,
            scored=scored.accepted[j],
            scored_se=scored.accepted_se[j],
            scored_target_only=scored.accepted_target_only[j],
            num_anchors=scored.num_anchors,
        )
        for j in range(len(scored.accepted))
    ]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def render(rows: Sequence[Row]) -> str:
    """The rows as an aligned table."""
    head = ("task", "depth", "accepted / drafts", "sampled", "scored (s.e.)", "target-only")
    lines = [head]
    for row in rows:
        counts = "-" if row.num_drafts is None else f"{row.num_accepted} / {row.num_drafts}"
        sampled = "-" if row.sampled is None else f"{row.sampled:.3f}"
        scored = f"{row.scored:.3f} ({row.scored_se:.3f})"
        lines.append((row.task, str(row.depth), counts, sampled, scored, f"{row.scored_target_only:.3f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
