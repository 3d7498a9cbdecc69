"""The text set of a run: sampled by the policy through the rollout engine, or read from the file that is given."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.config import Data, SftConfig
from bebop.data import load_tokenizer, make_prompts
from bebop.data.prompts import encode_prompts
from bebop.data.provided import chat_of, is_text, load_parquet, require_supervision
from bebop.data.self_distill import TextRow, rollout_sampling, self_distill, text_set
from bebop.errors import BadInput
from bebop.mtp import checkpoint_checksums
from bebop.records import Prompt

log = logging.getLogger(__name__)
DISTILL_NUM_SEQS = 256
TOKENIZER_FILES = ("tokenizer*", "chat_template*", "vocab*", "merges*", "special_tokens_map*", "added_tokens*")


def prepare_text(config: SftConfig, policy_dir: Path, home: Path) -> tuple[Path, dict[str, Any]]:
    """Folder of the run's text set (shared through `home`) and its text.json; samples it where it is not there yet.

    What makes the text goes into the fingerprint, and nothing else: loss, depth and training keys do not. Of given text
    that takes in the limit that it is cut at and the tokenizer's files, the chat template among them.
    """
    data = config.data
    parts: dict[str, Any] = {
        "policy": checkpoint_checksums(policy_dir).backbone,
        "data": data.model_dump(mode="json", exclude={"cache_hidden"}),
        "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p,
        "top_k": config.rollout.top_k,
        "dtype": config.model.dtype,
        "seed": config.seed,
    }
    if data.path is not None:
        stat = data.path.stat()
        parts["file"] = {"size": stat.st_size, "mtime": stat.st_mtime}
        if is_text(data.path):
            parts |= {"max_model_len": config.rollout.max_model_len, "tokenizer": _tokenizer_hash(policy_dir)}
    return text_set(home / "text", parts, lambda: _make(config, policy_dir))


def _tokenizer_hash(policy_dir: Path) -> str:
    """16 hex digits over the names and contents of a policy's tokenizer files."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in TOKENIZER_FILES for file in policy_dir.glob(pattern) if file.is_file()}):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _make(config: SftConfig, policy_dir: Path) -> dict[str, list[TextRow]]:
    data = config.data
    tokenizer = load_tokenizer(policy_dir)
    sets: Mapping[str, Sequence[Prompt] | Sequence[TextRow]]
    if data.path is None:
        sets = {
            "train": make_prompts(data.tasks, data.num_prompts, config.seed, "train"),
            "heldout": make_prompts(data.tasks, data.num_heldout, config.seed, "heldout"),
        }
    else:
        sets = _split(load_parquet(data.path, tokenizer, max_tokens=config.rollout.max_model_len), data)
    if isinstance(sets["train"][0], Prompt):
        sets = _sample(sets, config, policy_dir, tokenizer)
    for name, rows in sets.items():
        require_supervision(rows, f"{data.path or 'self-distillation'} ({name})")
    return {name: list(rows) for name, rows in sets.items()}


def _split(rows: list[TextRow] | list[Prompt], data: Data) -> dict[str, list[Any]]:
    if len(rows) <= data.num_heldout:
        raise BadInput(
            f"data.path={data.path}: {len(rows)} rows, and data.num_heldout={data.num_heldout} are set aside for "
            "scoring; give more rows or lower data.num_heldout"
        )
    heldout = rows[: data.num_heldout]
    scored = {chat_of(row) for row in heldout[-1:]}  # later rows of its chat have its text
    train = [row for row in rows[data.num_heldout :] if chat_of(row) not in scored][: data.num_prompts]
    if not train:
        raise BadInput(
            f"data.path={data.path}: all {len(rows)} rows are of chats that data.num_heldout={data.num_heldout} sets "
            "aside for scoring; give more chats or lower data.num_heldout"
        )
    return {"heldout": heldout, "train": train}


def _sample(
    sets: Mapping[str, Sequence[Prompt]], config: SftConfig, policy_dir: Path, tokenizer: Any
) -> dict[str, list[TextRow]]:
    from bebop.engines import make_engine

    encoded = {name: encode_prompts(prompts, config.data, tokenizer) for name, prompts in sets.items()}
    # One pass for all sets, so that the engine stays full; without speculation, as the heads are yet to be trained, and
    # with many requests at once, where plain decoding is at its best.
    at_once = max(config.rollout.max_num_seqs, DISTILL_NUM_SEQS)
    rollout = config.rollout.model_copy(update={"speculation": "none", "max_num_seqs": at_once})
    sampling = rollout_sampling(config)
    log.info("text: the policy answers %d prompts", sum(len(prompts) for prompts in encoded.values()))
    with make_engine(rollout, policy_dir, seed=config.seed, dtype=config.model.dtype) as engine:
        rows = self_distill(engine, [pair for prompts in encoded.values() for pair in prompts], sampling)
    names = {prompt.prompt_id: name for name, prompts in encoded.items() for prompt, _ in prompts}
    return {name: [row for row in rows if names[row.prompt_id] == name] for name in encoded}
