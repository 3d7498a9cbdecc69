"""The acceptance rules that vLLM supports, as vLLM's settings."""

from __future__ import annotations

from bebop.config import RolloutSection
from bebop.errors import EngineRefused

# rule -> vLLM's draft_sample_method and rejection_sample_method
SERVED_RULES = {
    "rejection": ("probabilistic", "standard"),
    "target_only": ("greedy", "standard"),
    "block": ("probabilistic", "block"),
}


def rule_methods(rollout: RolloutSection) -> tuple[str, str]:
    """vLLM's draft_sample_method and rejection_sample_method. Raises EngineRefused for other rules."""
    if rollout.rule not in SERVED_RULES:
        raise EngineRefused(
            f"rollout.rule: got {rollout.rule}, but rollout.engine=vllm supports only {', '.join(SERVED_RULES)}; "
            "set rollout.engine=torch, or one of these rules"
        )
    return SERVED_RULES[rollout.rule]
