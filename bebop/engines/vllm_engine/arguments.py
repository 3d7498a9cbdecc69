"""A rollout section and a sampling record in vLLM's own terms, and what vLLM must be refused. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop.config import RolloutSection
from bebop.config.draft_schedule import vllm_ranges
from bebop.engines.vllm_engine import fixes
from bebop.engines.vllm_engine.rules import rule_methods
from bebop.errors import EngineRefused
from bebop.mtp.checkpoint import read_config
from bebop.mtp.families import mixes_linear_attention
from bebop.records import Sampling


def engine_arguments(rollout: RolloutSection, policy_dir: Path, *, seed: int, dtype: str) -> dict[str, Any]:
    """vLLM's engine arguments for a rollout section; pure, apart from asking which platform this is."""
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
        # vLLM 0.31 caches the states of such layers only at some positions. With speculation nobody has shown that a
        # request which starts from a cached state samples what it should.
        arguments["enable_prefix_caching"] = False
    if fixes.on_cpu():
        # an explicit cache size with eager execution also spares the warm-up
        arguments |= {
            "enforce_eager": True,
            # vLLM 0.31 winds a seeded request's generator back after a partial prefill, which a CPU generator refuses:
            # the engine dies. Whole prefills need no winding back.
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30),
            "distributed_executor_backend": "uni",
        }
        if hybrid and dtype != "bfloat16":
            raise EngineRefused(
                f"model.dtype={dtype}: {policy_dir} has linear-attention layers, which vLLM 0.31 runs only in bfloat16 "
                "on a CPU; set model.dtype=bfloat16"
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
    """Raise where vLLM would silently draft greedily under block verification."""
    if rollout.speculation == "mtp" and rollout.rule == "block" and (on_cpu or not v2_runner):
        where = "on a CPU" if on_cpu else "with vLLM's V1 model runner"
        raise EngineRefused(
            f"rollout.rule=block {where}: vLLM would draft greedily without saying so; set rollout.rule=rejection"
        )


def sampling_values(sampling: Sampling) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams.

    What `Sampling` lacks (min_p, logit_bias, min_tokens, structured outputs), vLLM 0.31 applies to the first token of a
    verification step only, or not at all.
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
    """Version of each token. spans: (number of tokens there were, their version) at each update, in order."""
    versions: list[int] = []
    for had, until in spans:
        versions += [until] * (min(had, num_tokens) - len(versions))
    return tuple(versions + [version] * (num_tokens - len(versions)))
