"""Converts a rollout section and a sampling record to vLLM's arguments; refuses what vLLM does wrong. Pure code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop.config import RolloutSection
from bebop.config.draft_schedule import vllm_ranges
from bebop.engines.vllm_engine import fixes
from bebop.engines.vllm_engine.rules import rule_methods, verifies_blocks
from bebop.errors import EngineRefused
from bebop.mtp.checkpoint import read_config
from bebop.mtp.families import mixes_linear_attention
from bebop.records import Sampling


def engine_arguments(rollout: RolloutSection, policy_dir: Path, *, seed: int, dtype: str) -> dict[str, Any]:
    """vLLM's engine arguments for a rollout section. Depends on nothing else but the platform."""
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "dtype": dtype,
        "seed": seed,
        "max_num_seqs": rollout.max_num_seqs,
        "max_model_len": rollout.max_model_len,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "worker_extension_cls": "bebop.engines.vllm_engine.worker.WorkerExtension",
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
    }
    hybrid = mixes_linear_attention(read_config(policy_dir))
    if hybrid:
        # vLLM 0.31 caches the states of such layers only at some positions. With speculation, it is not proven that a
        # request which starts from a cached state samples from the right distribution.
        arguments["enable_prefix_caching"] = False
    if fixes.on_cpu():
        # an explicit cache size with eager execution also avoids the warm-up
        arguments |= {
            "enforce_eager": True,
            # vLLM 0.31 rewinds a seeded request's generator after a partial prefill. A CPU generator cannot do that,
            # and the engine dies. Whole prefills need no rewind.
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30),
            "distributed_executor_backend": "uni",
        }
        if hybrid and dtype != "bfloat16":
            raise EngineRefused(
                f"model.dtype: got {dtype}, but {policy_dir} has linear attention, which vLLM 0.31 runs only in "
                "bfloat16 on a CPU; set model.dtype=bfloat16"
            )
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    if rollout.speculation == "mtp":
        draft_method, verify_method = rule_methods(rollout)
        arguments |= {
            "speculative_config": {
                "method": "mtp",
                "num_speculative_tokens": rollout.num_speculative_tokens,
                "num_speculative_tokens_per_batch_size": (
                    vllm_ranges(rollout.draft_schedule, rollout.max_num_seqs) if rollout.draft_schedule else None
                ),
                "draft_sample_method": draft_method,
                "rejection_sample_method": verify_method,
            },
            "per_request_spec_decode_metrics": "detailed",
        }
    return arguments


def refuse_block(rollout: RolloutSection, *, on_cpu: bool, v2_runner: bool) -> None:
    """Raise EngineRefused if vLLM would silently draft greedily under block verification."""
    if verifies_blocks(rollout) and (on_cpu or not v2_runner):
        where = "on a CPU" if on_cpu else "with vLLM's V1 model runner"
        raise EngineRefused(
            f"rollout.rule: got {rollout.rule} {where}, where vLLM silently drafts greedily; set rollout.rule=rejection"
        )


def sampling_values(sampling: Sampling) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams.

    `Sampling` leaves out min_p, logit_bias, min_tokens and structured outputs, because vLLM 0.31 applies them only to
    the first token of a verification step, or not at all.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "logprobs": 0 if sampling.logprobs else None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }


def stamp(num_tokens: int, spans: Sequence[tuple[int, int]], version: int) -> tuple[int, ...]:
    """Policy version of each token. spans: (number of tokens so far, their version) at each update, in order."""
    versions: list[int] = []
    for had, until in spans:
        versions += [until] * (min(had, num_tokens) - len(versions))
    return tuple(versions + [version] * (num_tokens - len(versions)))
