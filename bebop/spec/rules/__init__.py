"""The chain rules, one module each, and their registry.

Legend: p target distribution, q draft distribution, both at the sampling temperature; y the draft token.

| rule        | draft token    | accept with                  | after a rejection       | source                   |
|-------------|----------------|------------------------------|-------------------------|--------------------------|
| rejection   | sampled from q | min(1, p(y) / q(y))          | norm(max(0, p - q))     | Bebop alg. 4             |
| target_only | argmax q       | p(y)                         | norm(p without y)       | Bebop alg. 3             |
| block       | sampled from q | h_i, the longest prefix wins | norm(max(0, w_i p - q)) | arXiv 2403.10444, alg. 2 |
"""

from __future__ import annotations

from bebop.registry import Registry
from bebop.spec.rules.base import ChainRule, DraftScores, Tests
from bebop.spec.rules.block import Block
from bebop.spec.rules.rejection import Rejection
from bebop.spec.rules.target_only import TargetOnly

__all__ = ["RULES", "ChainRule", "DraftScores", "Tests"]

RULES: Registry[ChainRule] = Registry("acceptance rule", key="rollout.rule")
for _rule in (Rejection(), TargetOnly(), Block()):
    RULES.register(_rule.name, _rule)
