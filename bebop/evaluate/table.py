"""The result of `eval` as rows: one per task, temperature and depth, raw counts beside every ratio.

sampled: the engine's counters, pooled over requests. as_drafted: scored at the places where the engine stood; the two
must agree (bebop.evaluate.agreement). scored, by rule: the heads re-run on the sampled text, every position alike.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bebop.acceptance.scores import Acceptance
from bebop.evaluate.agreement import Agreement
from bebop.records import DraftCounts


@dataclass(frozen=True)
class Row:
    """Draft depth `depth` of one task at one temperature. Probabilities are of the first `depth` drafts all accepted,
    but for alpha and rejection_ahead, which are of this depth for itself."""

    task: str
    temperature: float
    depth: int
    num_drafts: int | None  # the engine's; None: it drafts less deep, or not at all
    num_accepted: int | None
    sampled: float | None  # num_accepted / num_drafts, under the rollout's rule
    as_drafted: float | None  # what it should be, by the scores
    half_width_99: float | None  # of their difference, jointly over the run; None: too few responses to judge
    scored_target_only: float
    scored_rejection: float
    scored_rejection_se: float  # over responses
    scored_block: float
    product: float  # mean product of alphas along the text: biased, for comparison
    alpha: float  # mean sum min(p, q)
    rejection_ahead: float  # share of positions where d_TV < 1 - p(argmax q): rejection sampling beats target-only
    num_anchors: int


def rows_of(
    task: str,
    counts: DraftCounts | None,
    scored: Acceptance,
    agreement: Agreement | None,
    errors: Sequence[float],
    ahead: Sequence[float],
) -> list[Row]:
    """[K] rows of one task, K the depth that was scored. errors, ahead [K]: see Row."""
    accepted = counts.accepted_per_depth if counts and counts.num_drafts else ()
    rows = []
    for j in range(len(scored.accepted)):
        known = counts is not None and j < len(accepted)
        held = agreement if agreement is not None and j < len(agreement.sampled) else None
        rows.append(
            Row(
                task=task,
                temperature=scored.temperature,
                depth=j + 1,
                num_drafts=counts.num_drafts if known else None,
                num_accepted=accepted[j] if known else None,
                sampled=accepted[j] / counts.num_drafts if known else None,
                as_drafted=held.as_drafted[j] if held else None,
                half_width_99=held.half_width[j] if held and held.judged else None,
                scored_target_only=scored.accepted_target_only[j],
                scored_rejection=scored.accepted[j],
                scored_rejection_se=errors[j],
                scored_block=scored.accepted_block[j],
                product=scored.accepted_product[j],
                alpha=scored.alpha[j],
                rejection_ahead=ahead[j],
                num_anchors=scored.num_anchors,
            )
        )
    return rows


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def render(rows: Sequence[Row]) -> str:
    """The rows as an aligned table."""
    head = (
        *("task", "T", "depth", "accepted / drafts", "sampled", "as drafted (±99 %)"),
        *("target-only", "rejection (s.e.)", "block", "product", "alpha", "RS ahead"),
    )
    lines = [head]
    for row in rows:
        counts = "-" if row.num_drafts is None else f"{row.num_accepted} / {row.num_drafts}"
        sampled = "-" if row.sampled is None else f"{row.sampled:.4f}"
        width = "too few to judge" if row.half_width_99 is None else f"{row.half_width_99:.4f}"
        drafted = "-" if row.as_drafted is None else f"{row.as_drafted:.4f} ({width})"
        lines.append(
            (
                *(row.task, f"{row.temperature:g}", str(row.depth), counts, sampled, drafted),
                *(f"{row.scored_target_only:.4f}", f"{row.scored_rejection:.4f} ({row.scored_rejection_se:.4f})"),
                *(f"{row.scored_block:.4f}", f"{row.product:.4f}", f"{row.alpha:.4f}", f"{row.rejection_ahead:.0%}"),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
