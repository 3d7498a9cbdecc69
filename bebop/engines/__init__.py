"""Rollout engines behind one protocol: vLLM, with the corrections that the installed one needs, and bebop's own."""

from __future__ import annotations

import logging
from pathlib import Path

from bebop.config import RolloutSection, check_depth
from bebop.engines.protocol import RolloutEngine
from bebop.errors import EngineDied, EngineError, EngineRefused

logger = logging.getLogger("bebop.engines")

__all__ = ["EngineDied", "EngineError", "EngineRefused", "RolloutEngine", "check_policy", "make_engine"]


def make_engine(rollout: RolloutSection, policy_dir: Path, *, seed: int = 0, dtype: str = "float32") -> RolloutEngine:
    """Start the engine that `rollout.engine` asks for on a policy directory; close it, or use it as a context manager.

    dtype: "float32" or "bfloat16", of weights and KV cache. Raises ConfigError or EngineRefused before anything starts:
    no MTP head to draft with, a draft longer than the head was trained for, a vLLM that was never checked.
    """
    check_policy(rollout, Path(policy_dir))
    if rollout.engine == "torch":
        from bebop.engines.torch_engine.engine import TorchEngine

        return TorchEngine(rollout, Path(policy_dir), seed=seed, dtype=dtype)
    from bebop.engines.vllm_engine.engine import VllmEngine

    return VllmEngine(rollout, Path(policy_dir), seed=seed, dtype=dtype)


def check_policy(rollout: RolloutSection, policy_dir: Path) -> None:
    """Raise where the policy directory cannot serve what `rollout` asks for; nothing is loaded or started for it.

    Heads that bebop did not train have no depth to compare with, see bebop.mtp.checkpoint.trained_depth.
    """
    config_path = policy_dir / "config.json"
    if not config_path.is_file():
        raise EngineRefused(f"{policy_dir} holds no config.json: expected a Hugging Face directory of a policy")
    if rollout.engine == "torch":
        from bebop.engines.torch_engine.supported import check_supported

        check_supported(rollout, policy_dir)
    if rollout.speculation == "none":
        return
    if rollout.engine == "vllm":
        from bebop.engines.vllm_engine.rules import rule_methods

        rule_methods(rollout)
    from bebop.mtp.checkpoint import num_mtp_layers, trained_depth
    from bebop.mtp.families import COUNT_KEYS

    if not num_mtp_layers(policy_dir):
        raise EngineRefused(
            f"{policy_dir} has no MTP head ({' or '.join(COUNT_KEYS)} in config.json): "
            "train one with the sft command, or set rollout.speculation=none"
        )
    depth = trained_depth(policy_dir)
    if not depth:
        return
    check_depth(rollout, depth, "sft.depth")
    if rollout.draft_depth > depth:
        logger.info("rollout.tree_depth=%d: deeper than the head was trained, %s", rollout.draft_depth, depth)
