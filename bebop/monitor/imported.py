"""Records of other trainers, brought into bebop's record schema, so that slope, decomposition and report work on them.

A step needs its number, the entropy of the policy and an acceptance length. Sources:

    csv             a header with names of StepRecord (step, entropy_nats, reward_mean, ...); acceptance as raw counts
                    (num_drafts, num_draft_tokens, accepted_1, accepted_2, ...), or as acceptance_length
    verl console    lines "step:3 - actor/entropy:0.41 - ..." as verl's console logger prints them
    wandb           the history of a run: exported as CSV, or an offline run's .wandb file; verl's names
    prometheus      a folder of vLLM's /metrics pages, one for each step, saved after its rollouts: their numbers in the
                    file names are the steps. vLLM counts from its start, so a page before the first step is its zero

Ratios without raw counts (verl logs the mean of the requests' own acceptance lengths) are kept as such, and are a
definition of acceptance of their own.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bebop.errors import BadInput
from bebop.records import DraftCounts, StepRecord
from bebop.store.wandb import offline_history

# verl's name -> field of StepRecord; of several for one field, the first that a step has
VERL = {
    "actor/entropy": "entropy_nats",
    "actor/entropy_loss": "entropy_nats",
    "critic/score/mean": "reward_mean",
    "critic/rewards/mean": "reward_mean",
    "rollout/spec_accept_length": "acceptance_length",
    "response_length/mean": "response_length_mean",
    "training/rollout_probs_diff_max": "probs_diff_max",
    "timing_s/step": "step_s",
}
_FIELDS = {field.name for field in dataclasses.fields(StepRecord)} - {"counts", "extra", "step"}
_TEXT = {"acceptance_rule", "backbone_checksum", "heads_checksum_trainer", "heads_checksum_engine"}
_CONSOLE = re.compile(r"(?:^|\s)step:(\d+) - (.+)$")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_COUNTERS = "vllm:spec_decode_num_"

Row = dict[str, Any]


def read_source(path: Path) -> tuple[str, dict[int, Row]]:
    """The kind of a source, and its rows by step. Raises BadInput naming the file and what it lacks."""
    if path.is_dir():
        pages = sorted(page for page in path.iterdir() if page.is_file() and re.search(r"\d", page.name))
        if pages and not any(page.suffix == ".wandb" for page in pages):
            return "prometheus", _prometheus(pages)
        offline = sorted(path.glob("*.wandb"))
        if len(offline) != 1:
            raise BadInput(
                f"{path}: got a folder with 0 numbered pages of /metrics and {len(offline)} .wandb files, expected "
                "such pages or one such file"
            )
        path = offline[0]
    if path.suffix == ".wandb":
        return "wandb", _wandb(path)
    if not path.is_file():
        raise BadInput(f"{path}: no such file; give a CSV file, a log, a .wandb file or a folder of /metrics pages")
    text = _ANSI.sub("", path.read_text(encoding="utf-8", errors="replace")).replace("\r", "\n")
    found = [match for line in text.split("\n") if (match := _CONSOLE.search(line))]
    if found:
        return "verl console", {int(match[1]): _pairs(match[2]) for match in found}
    return "csv", _csv(path, text)


def steps_of(
    rows: Mapping[int, Row], *, num_speculative_tokens: int, acceptance_rule: str, temperature: float
) -> list[StepRecord]:
    """Rows by step as records. The three settings are those of rows that do not name their own.

    Raises BadInput where a step's value is not a number, or where no step has an entropy or an acceptance length.
    """
    common: Row = {
        "num_speculative_tokens": num_speculative_tokens,
        "acceptance_rule": acceptance_rule,
        "temperature": temperature,
    }
    records = [_record(step, common | rows[step]) for step in sorted(rows)]
    for name in ("entropy_nats", "acceptance_length"):
        if all(getattr(record, name) is None for record in records):
            known = ", ".join(sorted({key for row in rows.values() for key in row})[:12])
            raise BadInput(
                f"got {len(records)} steps without {name}, expected it or the names it comes from; have {known}"
            )
    return records


def _record(step: int, row: Row) -> StepRecord:
    row = dict(row)
    for theirs, ours in VERL.items():
        if theirs in row and row.get(ours) is None:
            row[ours] = row.pop(theirs)
    counts = _counts(step, row)
    length = row.pop("acceptance_length", None)
    if counts is None and length is not None:
        row["acceptance_length_mean_of_requests"] = length
    fields = {name: row.pop(name) for name in sorted(_FIELDS) if row.get(name) is not None}
    known: Row = {name: value if name in _TEXT else _number(step, name, value) for name, value in fields.items()}
    known = {"entropy_nats": None} | known | {"num_speculative_tokens": int(known["num_speculative_tokens"])}
    extra = {name: number for name, value in row.items() if (number := _plain(value)) is not None}
    return StepRecord(step=step, counts=counts, extra=extra, **known)


def _counts(step: int, row: Row) -> DraftCounts | None:
    drafts = row.pop("num_drafts", None)
    depths = sorted((name for name in row if re.fullmatch(r"accepted_\d+", name)), key=lambda name: int(name[9:]))
    accepted = tuple(round(_number(step, name, row.pop(name) or 0)) for name in depths)
    tokens = row.pop("num_draft_tokens", None)
    if drafts is None or not accepted:
        return None
    num_drafts = round(_number(step, "num_drafts", drafts))
    if not num_drafts:
        return None
    if any(a > b for a, b in zip(accepted, (num_drafts, *accepted), strict=False)):
        raise BadInput(f"step {step}: got {num_drafts} drafts and {accepted} accepted by depth, expected no rise")
    num_tokens = num_drafts * len(accepted) if tokens is None else round(_number(step, "num_draft_tokens", tokens))
    return DraftCounts(num_drafts, num_tokens, accepted)


def _csv(path: Path, text: str) -> dict[int, Row]:
    reader = csv.DictReader(text.splitlines())
    names = [name.strip() for name in reader.fieldnames or ()]
    step = next((name for name in ("step", "_step", "training/global_step") if name in names), None)
    if step is None:
        raise BadInput(f"{path}: got columns {', '.join(names)[:80] or 'none'}, expected one named step")
    rows: dict[int, Row] = {}
    for number, values in enumerate(reader, start=2):
        row = {(key or "").strip(): value for key, value in values.items() if isinstance(value, str) and value.strip()}
        at = _plain(row.pop(step, None))
        if at is None or at != int(at) or at < 0:
            raise BadInput(f"{path}:{number}: got step {values.get(step)!r}, expected a whole number")
        # wandb's export leaves a cell empty in a row that did not log it
        rows.setdefault(int(at), {}).update(_shortened(row))
    return rows


def _shortened(row: Row) -> Row:
    # wandb's export puts the run's name before each column: "my-run - actor/entropy"
    return {name.rsplit(" - ", 1)[-1]: value for name, value in row.items() if not name.endswith(("__MIN", "__MAX"))}


def _pairs(text: str) -> Row:
    row: Row = {}
    for part in text.split(" - "):
        name, _, value = part.rpartition(":")
        if name:
            row[name.strip()] = value.strip()
    return row


def _wandb(path: Path) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    for values in offline_history(path):
        step = int(values.pop("_step"))
        rows.setdefault(int(values.pop("training/global_step", step)), {}).update(values)
    if not rows:
        raise BadInput(f"{path}: got no logged steps, expected the history of a run")
    return rows


def _prometheus(pages: Iterable[Path]) -> dict[int, Row]:
    """Differences of vLLM's counters between the pages."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[int, dict[str, float]] = {}
    for page in pages:
        step = int(re.findall(r"\d+", page.name)[-1])
        total: dict[str, float] = {}
        try:
            families = list(text_string_to_metric_families(page.read_text()))
        except ValueError as error:
            raise BadInput(f"{page}: got {error}, expected a page of Prometheus metrics") from None
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith(_COUNTERS) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(_COUNTERS).removesuffix("_total")
                if name == "accepted_tokens_per_pos":
                    name = f"accepted_{int(sample.labels['position']) + 1}"
                total[name] = total.get(name, 0.0) + sample.value  # over engines
        totals[step] = total
    if not any(totals.values()):
        raise BadInput(f"{next(iter(pages)).parent}: 0 of {len(totals)} pages have counters {_COUNTERS}*")
    steps = sorted(totals)
    rows: dict[int, Row] = {}
    for before, step in itertools.pairwise(steps):
        change = {name: value - totals[before].get(name, 0.0) for name, value in totals[step].items()}
        if any(value < 0 for value in change.values()):
            change = dict(totals[step])  # the server started again
        rows[step] = {
            "num_drafts": change.get("drafts"),
            "num_draft_tokens": change.get("draft_tokens"),
            **{name: value for name, value in change.items() if re.fullmatch(r"accepted_\d+", name)},
        }
    return rows


def _plain(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _number(step: int, name: str, value: Any) -> float:
    number = _plain(value)
    if number is None:
        raise BadInput(f"step {step}: {name}: got {value!r}, expected a finite number")
    return number
