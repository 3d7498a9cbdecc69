"""Rollout engines behind one protocol (bebop.engines.protocol), by the name in `rollout.engine`.

ENGINES contains vLLM, with bebop's fixes for the installed version, and bebop's own engine on PyTorch. To add another:
ENGINES.register("mine", EngineInfo(make=MyEngine)).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bebop.config import RolloutSection, check_depth
from bebop.engines.protocol import RolloutEngine
from bebop.engines.vllm_engine.rules import SERVED_RULES
from bebop.errors import BadInput, EngineDied, EngineError, EngineRefused
from bebop.registry import Registry

if TYPE_CHECKING:
    from bebop.mtp.reading import Reading

logger = logging.getLogger("bebop.engines")

__all__ = [
    "ENGINES",
    "EngineDied",
    "EngineError",
    "EngineInfo",
    "EngineRefused",
    "RolloutEngine",
    "check_policy",
    "make_engine",
]


@dataclass(frozen=True)
class EngineInfo:
    """One engine.

    make: (rollout, policy_dir, seed=, dtype=) -> a running engine. check: (rollout, reading) -> None, raises
    EngineRefused for a policy that the engine does not support, before anything is loaded.
    trees, draft_schedules: whether it supports `rollout.tree` and `rollout.draft_schedule`. rules: names of the
    acceptance rules that it serves; None: every registered rule. vLLM serves those in SERVED_RULES, the torch engine
    all.
    verl_server: module that registers the engine's server with verl, under the engine's name; None: not for grpo.
    """

    make: Callable[..., RolloutEngine]
    check: Callable[[RolloutSection, Reading], None] = lambda rollout, reading: None
    trees: bool = False
    draft_schedules: bool = False
    verl_server: str | None = None
    rules: tuple[str, ...] | None = None

    def check_section(self, section: Any, key: str, name: str) -> None:
        """Raise BadInput if the rollout section sets a key that this engine does not support."""
        for wanted, neutral, served in (("tree", "none", self.trees), ("draft_schedule", None, self.draft_schedules)):
            value = getattr(section, wanted, neutral)
            if value != neutral and not served:
                able = [other for other in ENGINES if getattr(ENGINES[other], f"{wanted}s")]
                raise BadInput(
                    f"rollout.{wanted}: got {value} with {key}={name}, which does not support it; set {key}="
                    f"{' or '.join(able)}, or rollout.{wanted}={'null' if neutral is None else neutral}"
                )
        rule = getattr(section, "rule", None)
        if rule is not None and self.rules is not None and rule not in self.rules:
            able = [other for other in ENGINES if (rules := ENGINES[other].rules) is None or rule in rules]
            raise BadInput(
                f"rollout.rule: got {rule} with {key}={name}, which supports only {', '.join(self.rules)}; set {key}="
                f"{' or '.join(able)}, or one of these rules"
            )


def _vllm(rollout: RolloutSection, policy_dir: Path, **settings: Any) -> RolloutEngine:
    from bebop.engines.vllm_engine.engine import VllmEngine

    return VllmEngine(rollout, policy_dir, **settings)


def _torch(rollout: RolloutSection, policy_dir: Path, **settings: Any) -> RolloutEngine:
    from bebop.engines.torch_engine.engine import TorchEngine

    return TorchEngine(rollout, policy_dir, **settings)


def _check_torch(rollout: RolloutSection, reading: Reading) -> None:
    from bebop.engines.torch_engine.supported import check_supported

    check_supported(rollout, reading)


ENGINES: Registry[EngineInfo] = Registry("engine", key="rollout.engine")
ENGINES.register(
    "vllm",
    EngineInfo(_vllm, draft_schedules=True, verl_server="bebop.rl.rollout.vllm_server", rules=tuple(SERVED_RULES)),
)
ENGINES.register("torch", EngineInfo(_torch, _check_torch, trees=True, verl_server="bebop.rl.rollout.torch_server"))


def make_engine(rollout: RolloutSection, policy_dir: Path, *, seed: int = 0, dtype: str = "float32") -> RolloutEngine:
    """Start the engine named by `rollout.engine` on a policy directory. Close it, or use it as a context manager.

    dtype: "float32" or "bfloat16", of weights and KV cache. Raises ConfigError or EngineRefused before anything starts,
    for example if there is no MTP head, the draft is longer than the head was trained for, or the vLLM version is
    unknown.
    """
    check_policy(rollout, Path(policy_dir))
    return ENGINES[rollout.engine].make(rollout, Path(policy_dir), seed=seed, dtype=dtype)


def check_policy(rollout: RolloutSection, policy_dir: Path) -> None:
    """Raise if the policy directory does not support `rollout`, without loading or starting anything.

    The depth is not checked for heads that bebop did not train, see bebop.mtp.checkpoint.trained_depth.
    """
    # these import transformers
    from bebop.mtp.checkpoint import trained_depth
    from bebop.mtp.families import COUNT_KEYS
    from bebop.mtp.reading import read_policy

    try:
        reading = read_policy(policy_dir)
    except BadInput as error:
        raise EngineRefused(str(error)) from None
    ENGINES[rollout.engine].check(rollout, reading)
    if rollout.speculation == "none":
        return
    if not reading.mtp_layers:
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
