"""The result of `eval` as rows: one per task, temperature and depth, raw counts beside every ratio.

observed: the engine's counters, pooled over requests. predicted: the scores, weighted by the positions that the engine
visits; the two must agree (bebop.evaluate.agreement). scored_<rule>: the heads run again on the sampled text, the mean
over all positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bebop.acceptance import Acceptance
from bebop.evaluate.agreement import Agreement
from bebop.records import DraftCounts
from bebop.spec import RULES
from bebop.store.tables import format_table

Row = dict[str, Any]


def rows_of(task: str, counts: DraftCounts | None, scored: Acceptance, agreement: Agreement | None) -> list[Row]:
    """[K] rows of one task; K is the scored depth.

    Probabilities are those that the first `depth` draft tokens are all accepted; alpha and rejection_ahead are for this
    depth only. Values of the engine are None at depths that it does not draft; half_width_99 also with too few
    responses.
    """
    drafts, accepted = (counts.num_drafts, counts.accepted_per_depth) if counts else (0, ())
    rows = []
    for j, alpha in enumerate(scored.alpha):
        known = drafts > 0 and j < len(accepted)
        held = agreement if agreement is not None and j < len(agreement.observed) else None
        row: Row = {
            "task": task,
            "temperature": scored.temperature,
            "depth": j + 1,
            "num_drafts": drafts if known else None,
            "num_accepted": accepted[j] if known else None,
            "observed": accepted[j] / drafts if known else None,
            "predicted": held.predicted[j] if held else None,
            "half_width_99": held.half_width_99[j] if held and held.judged else None,
        }
        for name, rule in scored.rules.items():
            row |= {f"scored_{name}": rule.accepted[j], f"scored_{name}_se": rule.accepted_se[j]}
        rows.append(
            row
            | {
                "product": scored.accepted_product[j],  # of alphas along the text: biased, for comparison
                "alpha": alpha,
                "rejection_ahead": scored.rejection_ahead[j],
                "num_anchors": scored.num_anchors,
            }
        )
    return rows


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table for the console."""
    return format_table([_shown(row) for row in rows])


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    def number(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.4f}"

    width = "too few to judge" if row["half_width_99"] is None else number("half_width_99")
    return {
        "task": row["task"],
        "T": f"{row['temperature']:g}",
        "depth": str(row["depth"]),
        "accepted / drafts": "-" if row["num_drafts"] is None else f"{row['num_accepted']} / {row['num_drafts']}",
        "observed": number("observed"),
        "predicted (±99 %)": "-" if row["predicted"] is None else f"{number('predicted')} ({width})",
        **{RULES[name].title: f"{number(f'scored_{name}')} ({number(f'scored_{name}_se')})" for name in RULES},
        "product": number("product"),
        "alpha": number("alpha"),
        "rejection ahead": f"{row['rejection_ahead']:.0%}",
    }
