"""Fixes for the installed vLLM, each with the upstream fault, the versions it was checked on, and its switch.

| patch         | where | upstream fault                                                                               |
|---------------|-------|----------------------------------------------------------------------------------------------|
| expand_batch  | CPU   | temperatures are cast to int64 for draft tokens: speculation at T != 1 is biased             |
| plain_weights | CPU   | weights are packed for CPU kernels, and updates do not reach them (see plain.py)             |
| request_stats | any   | counts moved to CompletionOutput; verl 0.9.1 reads them from RequestOutput.metrics           |
| seeded_drafts | any   | drafts use the engine's random stream: a request's seed does not determine its tokens        |
| head_rotary   | CPU   | queries of DeepSeek's attention are rotated wrongly: another policy is served                |
| text_only     | any   | text-only Qwen3.5 fails to load without torchvision, because an image helper is imported     |
| cpu_draws     | CPU   | sampling takes a random number per token of the vocabulary: slow in large batches            |
| padded_drafts | any   | if a one-token prompt joins, the batch's draft distributions are lost: sampling is biased    |
| folder_names  | any   | a checkpoint's path is read as a glob pattern: nothing is found where it has a "["           |
| draft_lengths | any   | draft lengths by batch size are fixed at the start: timing each k would need its own engine  |
| padding_ids   | any   | ids that the model has and its tokenizer lacks are sampled                                   |

vLLM is imported only inside functions: every vLLM process reads this module, and so do tests without vLLM.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.data.tokenizer import num_token_ids
from bebop.engines.vllm_engine import draft_length, plain, sampling
from bebop.errors import PatchRefused

logger = logging.getLogger("bebop.engines")

FIXES_ENV = "BEBOP_ENGINE_FIXES"  # "0": do not change vLLM
PLAIN_WEIGHTS_ENV = "BEBOP_KEEP_PLAIN_WEIGHTS"  # "1": CPU layers keep plain weights, so that updates reach them
KNOWN_VERSIONS = ("0.31.0",)  # the faults and their fixes were reproduced on these

_MARK = "_bebop_patch"


@dataclass(frozen=True)
class RequestSpecDecodeStats:
    """One request's draft counts under the names that verl reads, and its acceptances per depth.

    num_verify_steps: target forwards that carried a draft; accepted_per_depth: [K], depth j implies 1..j-1.
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    num_verify_steps: int
    accepted_per_depth: tuple[int, ...]


@dataclass(frozen=True)
class Patch:
    """name: key in the status; lossless: speculation is biased without it; wanted: whether to apply it here."""

    name: str
    lossless: bool
    wanted: Callable[[], bool]
    apply: Callable[[], None]


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Spread per-request values over each request's draft tokens.

    x: [B] any dtype; cu_num_tokens: [B] cumulative number of tokens, int; returns [num_tokens], dtype of x, where
    values equal to `replace_from` become `replace_to`. x = [a, b, c], cu_num_tokens = [2, 5, 6]: [a, a, b, b, b, c].

    vLLM 0.31.0 on a CPU (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) casts x and the output to int64 and
    never copies back, so that the temperatures of the verified positions are left uninitialised. Can go when that
    function keeps floats.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype, device=x.device), x)
    return torch.repeat_interleave(values, counts.long(), output_size=num_tokens)


def _apply_expand_batch() -> None:
    from vllm.v1.sample import rejection_sampler

    _replace(rejection_sampler, "expand_batch_to_tokens", expand_batch_to_tokens)


def _apply_request_stats() -> None:
    """Set `RequestOutput.metrics.request_spec_decode_stats` from `CompletionOutput.spec_decode_metrics`.

    vLLM >= 0.30 puts a finished request's counts on its completion; verl 0.9.1 reads them from the metrics.
    """
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.stats import RequestStateStats

    stock = RequestState._new_request_output

    @functools.wraps(stock)
    def with_stats(self: Any, external_req_id: str, outputs: list, finished: bool, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, external_req_id, outputs, finished, *args, **kwargs)
        counted = getattr(outputs[0], "spec_decode_metrics", None) if finished and outputs else None
        if counted is not None:
            if result.metrics is None:  # the engine runs with log_stats off
                result.metrics = RequestStateStats()
            result.metrics.request_spec_decode_stats = stats_of(counted)
        return result

    _replace(RequestState, "_new_request_output", with_stats)


def _apply_seeded_drafts() -> None:
    """Sample the drafts of a request with a seed from its own generator, as all its other tokens.

    vLLM 0.31.0 (`vllm/v1/spec_decode/llm_base_proposer.py`, `compute_probs_and_sample_next_token`: "TODO: Consider
    seeds") samples all drafts from the global stream. The distribution of a draft does not change.
    """
    from vllm.v1.spec_decode import llm_base_proposer

    stock = llm_base_proposer.compute_probs_and_sample_next_token

    @functools.wraps(stock)
    def seeded(logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> tuple:
        tokens, probs = stock(logits, sampling_metadata, *args, **kwargs)
        if not sampling_metadata.all_greedy:
            redraw_seeded(tokens, probs, sampling_metadata.generators, sampling_metadata.temperature)
        return tokens, probs

    _replace(llm_base_proposer, "compute_probs_and_sample_next_token", seeded)


def redraw_seeded(
    tokens: torch.Tensor, probs: torch.Tensor, generators: dict[int, torch.Generator], temperature: torch.Tensor
) -> None:
    """Sample the token of every request that has a generator again, in place, from the same distribution.

    tokens: [B] ids; probs: [B, V] draft distributions; temperature: [B], requests at 0 stay greedy.
    """
    for row, generator in generators.items():
        if row < tokens.shape[0] and temperature[row] >= 1e-5:
            noise = torch.empty_like(probs[row]).exponential_(generator=generator)
            tokens[row] = (probs[row] / noise).argmax()


def _apply_padded_drafts() -> None:
    """Give a draft without a distribution one of zeros, so that it is rejected and its token sampled from the target.

    If a request's first step computes one token while others decode, vLLM 0.31.0 pads it with draft ids of -1
    (`pad_spec_decode` in its scheduler). These have no row in the cache of draft distributions. Then
    `GPUModelRunner._get_spec_decode_draft_probs` drops the rows of the whole batch, and sampled drafts are accepted
    with p instead of p / q. Can go when vLLM keeps the rows (vllm-project/vllm#44869 makes it an error).
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock = GPUModelRunner._get_spec_decode_draft_probs

    @functools.wraps(stock)
    def every_row(self: Any, spec_decode_metadata: Any) -> torch.Tensor | None:
        if self._draft_probs is None or self._draft_prob_req_ids is None:
            return None
        drafted, requests = self._draft_prob_req_ids, self.input_batch.req_ids
        return draft_rows(self._draft_probs, drafted, requests, spec_decode_metadata.num_draft_tokens)

    _replace(GPUModelRunner, "_get_spec_decode_draft_probs", every_row)


def draft_rows(
    probs: torch.Tensor, drafted: Sequence[str], requests: Sequence[str], num_draft_tokens: Sequence[int]
) -> torch.Tensor | None:
    """Distributions [N, V] of the draft tokens of a batch, request by request; None if there is no draft.

    probs: [B, K, V] of the requests `drafted`, [B], in the previous step; requests, num_draft_tokens: [R], the requests
    of the batch now and their numbers of draft tokens, N in total. A request without a draft gets zeros.
    """
    row_of = {request: row for row, request in enumerate(drafted)}
    rows = []
    for request, count in zip(requests, num_draft_tokens, strict=True):
        if count:
            row = row_of.get(request)
            rows.append(probs.new_zeros(count, probs.shape[-1]) if row is None else probs[row, :count])
    return torch.cat(rows) if rows else None


def _apply_head_rotary() -> None:
    """The CPU operator reads [T, heads, width] with the wrong strides, so it gets [T, heads * width]."""
    from vllm import _custom_ops

    stock = _custom_ops.rotary_embedding

    @functools.wraps(stock)
    def by_rows(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *args: Any, **kwargs: Any):
        given = [x for x in (query, key) if x is not None and x.dim() == 3]
        flat = {id(x): x.flatten(1).clone(memory_format=torch.contiguous_format) for x in given}
        stock(positions, flat.get(id(query), query), flat.get(id(key), key), *args, **kwargs)
        for x in given:
            x.copy_(flat[id(x)].view(x.shape))

    _replace(_custom_ops, "rotary_embedding", by_rows)


def _apply_text_only() -> None:
    """vLLM's qwen2_vl.py and qwen3_vl.py, which qwen3_5.py imports, import `smart_resize` from a file of transformers
    that needs torchvision. Transformers' file for PIL has the same function."""
    package = "transformers.models.qwen2_vl"
    sys.modules[f"{package}.image_processing_qwen2_vl"] = _StandIn(f"{package}.image_processing_pil_qwen2_vl")


def _apply_folder_names() -> None:
    """Take the folder of a pattern by its name, in the two files of vLLM that list a checkpoint's files with `glob`."""
    from vllm.model_executor.model_loader import default_loader, weight_utils

    def in_folder(pattern: str) -> list[str]:
        folder, last = os.path.split(pattern)
        return glob.glob(os.path.join(glob.escape(folder), last))

    for module in (default_loader, weight_utils):
        _replace(module, "glob", types.SimpleNamespace(glob=in_folder))


class _StandIn(types.ModuleType):
    """A module that is imported at its first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def _apply_padding_ids() -> None:
    """Give no probability to the rows of lm_head that no id of the tokenizer stands for, in target and drafter.

    Only in bebop's own engines, which are known by their worker: the trainer's log-probabilities leave the same ids
    out (bebop.backbone). vLLM 0.31.0 knows of rows that it pads with itself, and takes `vocab_size` for the real ids.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    stock_init, stock_apply = LogitsProcessor.__init__, LogitsProcessor._apply_head

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        config = get_current_vllm_config()
        if str(config.parallel_config.worker_extension_cls).startswith("bebop."):
            self.bebop_num_ids = num_token_ids(Path(config.model_config.model))

    @functools.wraps(stock_apply)
    def apply(self: Any, lm_head: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = stock_apply(self, lm_head, *args, **kwargs)
        num_ids = getattr(self, "bebop_num_ids", None)
        if num_ids is not None:
            first = lm_head.shard_indices.org_vocab_start_index  # of this rank's rows
            logits[..., max(0, num_ids - first) :] = -torch.inf
        return logits

    _replace(LogitsProcessor, "__init__", init)
    _replace(LogitsProcessor, "_apply_head", apply)


def stats_of(counted: Any) -> RequestSpecDecodeStats:
    """Counts of vLLM's RequestSpecDecodeMetrics: its `histogram[j]` is the number of drafts with j accepted tokens."""
    histogram = list(counted.histogram)
    return RequestSpecDecodeStats(
        num_draft_tokens=int(counted.num_draft_tokens),
        num_accepted_tokens=sum(j * n for j, n in enumerate(histogram)),
        num_verify_steps=sum(histogram),
        accepted_per_depth=tuple(sum(histogram[j:]) for j in range(1, len(histogram))),
    )


PATCHES = (
    Patch("expand_batch", True, lambda: on_cpu(), _apply_expand_batch),
    Patch(
        "plain_weights",
        False,
        lambda: on_cpu() and os.environ.get(PLAIN_WEIGHTS_ENV) == "1",
        lambda: plain.apply(_replace),
    ),
    Patch("request_stats", False, lambda: True, _apply_request_stats),
    Patch("cpu_draws", False, lambda: on_cpu(), lambda: sampling.apply(_replace)),
    Patch("seeded_drafts", False, lambda: not on_cpu(), _apply_seeded_drafts),  # cpu_draws gives them theirs
    Patch("head_rotary", False, lambda: on_cpu(), _apply_head_rotary),
    Patch("padded_drafts", True, lambda: True, _apply_padded_drafts),
    Patch("padding_ids", True, lambda: True, _apply_padding_ids),
    Patch("draft_lengths", False, lambda: True, draft_length.apply),
    Patch("folder_names", False, lambda: True, _apply_folder_names),
    Patch("text_only", False, lambda: importlib.util.find_spec("torchvision") is None, _apply_text_only),
)
_status: dict[str, str] = {}


def apply_all() -> dict[str, str]:
    """Apply every wanted patch once; returns patch name -> "applied" | "off" | "not needed" | "refused: <why>"."""
    if os.environ.get(FIXES_ENV, "1") == "0":
        return {patch.name: "off" for patch in PATCHES}
    version = installed_version()
    for patch in PATCHES:
        if _status.get(patch.name) == "applied":
            continue
        if not patch.wanted():
            _status[patch.name] = "not needed"
        elif version not in KNOWN_VERSIONS:
            _status[patch.name] = f"refused: vllm {version} is not one of {', '.join(KNOWN_VERSIONS)}"
        else:
            try:
                patch.apply()
                _status[patch.name] = "applied"
            except (ImportError, AttributeError) as error:
                _status[patch.name] = f"refused: {error}"
        if _status[patch.name].startswith("refused"):
            logger.warning("bebop leaves vLLM as it is, patch %s %s", patch.name, _status[patch.name])
    return dict(_status)


def require(version: str | None = None) -> None:
    """Raise PatchRefused if losslessness is unproven on this vLLM, so that bebop's engine must not start."""
    version = version or installed_version()
    if version not in KNOWN_VERSIONS and os.environ.get(FIXES_ENV, "1") != "0":
        raise PatchRefused(
            f"vllm: got version {version}, expected {' or '.join(KNOWN_VERSIONS)}, on which lossless speculation was "
            f"checked; install that, or set {FIXES_ENV}=0 to run without proof"
        )


def expand_keeps_floats() -> bool:
    """Whether `expand_batch_to_tokens` keeps fractions in this process. Only the engine's worker can tell."""
    from vllm.v1.sample import rejection_sampler

    device = "cpu" if on_cpu() else "cuda"
    x = torch.tensor([0.7, 0.0, 0.5], device=device)
    cu = torch.tensor([2, 3, 5], dtype=torch.int32, device=device)
    got = rejection_sampler.expand_batch_to_tokens(x, cu, 5, replace_from=0, replace_to=1)
    return torch.equal(got, torch.tensor([0.7, 0.7, 1.0, 0.5, 0.5], device=device))


def installed_version() -> str:
    """vLLM's own version without a local part such as "+cpu"."""
    from vllm.version import __version__

    return __version__.split("+")[0]


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _replace(owner: Any, name: str, new: Callable) -> None:
    if not hasattr(getattr(owner, name), _MARK):
        setattr(new, _MARK, True)
        setattr(owner, name, new)
