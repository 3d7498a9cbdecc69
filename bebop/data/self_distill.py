"""The training sequences of heads: the policy's own samples, or provided data (bebop.data.provided).

Heads should predict the policy, so text that the policy sampled at the rollouts' temperature is best
(self-distillation). Only on such text is scored acceptance unbiased. A text set is one folder

    train.parquet, heldout.parquet    a row per sequence, see `TextRow`
    text.json                         what made it, written last: a folder with it is complete

It is made once and shared by all runs with the same inputs (for example all losses of a comparison).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from bebop.config import EvalConfig, SftConfig
from bebop.errors import BadInput
from bebop.records import Prompt, Rollout, Sampling
from bebop.store.caches import Inputs, made_from, name_of
from bebop.store.files import filled, read_json, write_json

log = logging.getLogger(__name__)
META, SPLITS = "text.json", ("train", "heldout")
NO_RESPONSE = "prompt without a response"


@dataclass(frozen=True)
class TextRow:
    """One sequence: `prompt_ids` are read, `response_ids` are predicted where `response_mask` is 1."""

    prompt_id: str
    task: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]  # 0 or 1, one per response token (0: another turn's prompt inside the response)
    logprobs: tuple[float, ...] | None = None  # one per response token, by the policy that sampled it; None: given text

    @property
    def input_ids(self) -> list[int]:
        """[T] prompt and response."""
        return [*self.prompt_ids, *self.response_ids]

    @property
    def loss_mask(self) -> list[int]:
        """[T] 1 where the token itself is supervised."""
        return [0] * len(self.prompt_ids) + list(self.response_mask)


Sets = Mapping[str, Sequence[TextRow]]


class Sampler(Protocol):
    """The part of a rollout engine that self-distillation needs."""

    async def agenerate(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str | None = None
    ) -> Rollout: ...


def sample_all(
    engine: Sampler, prompts: Sequence[Sequence[int]], sampling: Sampling, *, title: str, progress: bool = True
) -> list[Rollout]:
    """One response to every prompt (token ids), in their order; request i has the seed sampling.seed + i."""

    async def all_of_them() -> list[Rollout]:
        with tqdm(total=len(prompts), desc=title, unit="response", disable=not progress) as bar:

            async def one(index: int, prompt: Sequence[int]) -> Rollout:
                own = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)
                rollout = await engine.agenerate(prompt, own)
                bar.update()
                return rollout

            return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))

    return asyncio.run(all_of_them())


def self_distill(
    engine: Sampler,
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    sampling: Sampling,
    left_out: Counter[str] | None = None,
    *,
    progress: bool = True,
) -> list[TextRow]:
    """One response of the policy to every prompt.

    prompts: each with its token ids. sampling: as rollouts are sampled; its seed makes every request's own. Responses
    that the engine aborted and empty ones are left out, and added to `left_out`. Raises ValueError where none is left.
    """
    ids = [list(ids) for _, ids in prompts]
    rollouts = sample_all(engine, ids, sampling, title="self-distillation", progress=progress)
    rows = [
        TextRow(p.prompt_id, p.task, r.prompt_ids, r.token_ids, (1,) * len(r.token_ids), r.logprobs)
        for (p, _), r in zip(prompts, rollouts, strict=True)
        if r.token_ids and r.finish_reason != "abort"
    ]
    if not rows:
        reasons = sorted({r.finish_reason for r in rollouts})
        raise BadInput(f"self-distillation: 0 of {len(prompts)} prompts got a response, finish reasons {reasons}")
    if left_out is not None and len(rows) < len(prompts):
        left_out[NO_RESPONSE] += len(prompts) - len(rows)
    return rows


def text_set(root: Path, inputs: Inputs, make: Callable[[Inputs, Counter[str]], Sets]) -> tuple[Path, dict[str, Any]]:
    """The folder of the text set of `inputs` (bebop.store.caches), made unless it is already whole, and its text.json.

    make: (inputs, counts of what is left out, by reason) -> {"train": rows, "heldout": rows}. A killed run leaves
    nothing that looks finished; a second run that wants the same set waits for the first.
    """

    def fill(part: Path) -> None:
        left_out = Counter[str]()
        sets = make(inputs, left_out)
        meta: dict[str, Any] = {"fingerprint": folder.name, "made_from": made_from(inputs), "left_out": dict(left_out)}
        for split in SPLITS:
            _write(part / f"{split}.parquet", sets[split])
            meta[f"num_{split}"] = len(sets[split])
            meta[f"num_{split}_response_tokens"] = sum(sum(row.response_mask) for row in sets[split])
        meta["sampled_by_policy"] = all(row.logprobs is not None for split in SPLITS for row in sets[split])
        write_json(part / META, meta)

    folder = root / name_of(inputs)
    if folder.exists():
        log.info("training sequences: %s is reused", folder)
    filled(folder, fill)
    return folder, read_json(folder / META)


def read_rows(path: Path) -> list[TextRow]:
    """Rows of a text set's parquet file."""
    import pyarrow.parquet as parquet

    rows = parquet.read_table(path).to_pylist()
    return [TextRow(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows]


def _write(path: Path, rows: Sequence[TextRow]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    ids = pa.list_(pa.int32())
    schema = pa.schema(
        [
            ("prompt_id", pa.string()),
            ("task", pa.string()),
            ("prompt_ids", ids),
            ("response_ids", ids),
            ("response_mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
        ]
    )
    parquet.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema), path)


def rollout_sampling(config: SftConfig | EvalConfig) -> Sampling:
    """Sampling settings for responses to the config's prompts."""
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_tokens,
        seed=config.seed,
    )
