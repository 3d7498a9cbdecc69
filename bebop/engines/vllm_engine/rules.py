"""The acceptance rules that vLLM supports, as vLLM's settings."""

from __future__ import annotations

from bebop.config import RolloutSection
from bebop.errors import EngineRefused
from bebop.spec import RULES

# rule -> vLLM's rejection_sample_method; its draft_sample_method follows from how the rule drafts
SERVED_RULES = {"rejection": "standard", "target_only": "standard", "block": "block"}
DRAFTS = {"sampled": "probabilistic", "argmax": "greedy"}


def rule_methods(rollout: RolloutSection) -> tuple[str, str]:
    """vLLM's draft_sample_method and rejection_sample_method. Raises EngineRefused for rules that it does not serve."""
    if rollout.rule not in SERVED_RULES:
        raise EngineRefused(
            f"rollout.rule: got {rollout.rule}, but rollout.engine=vllm supports only {', '.join(SERVED_RULES)}; "
            "set rollout.engine=torch, or one of these rules"
        )
    return DRAFTS[RULES[rollout.rule].draft], SERVED_RULES[rollout.rule]


def verifies_blocks(rollout: RolloutSection) -> bool:
    """Whether the rule takes vLLM's block verification, which only its V2 model runner has."""
    return rollout.speculation == "mtp" and SERVED_RULES.get(rollout.rule) == "block"
