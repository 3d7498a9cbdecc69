"""The sampling rules of speculative decoding as functions of probabilities; no model code.

rules/: the chain rules, one module each, and their registry; chain.py: verification of chains; tree/: draft trees;
distributions.py: ratio and residual; sampling.py: logits to probabilities; random.py: random numbers and draws.
"""

from bebop.spec.chain import ChainResult, verify_chain
from bebop.spec.distributions import acceptance_ratio, residual
from bebop.spec.random import StreamId, Streams, Uniforms, invert, sample
from bebop.spec.rules import RULES, ChainRule, DraftScores, Tests
from bebop.spec.sampling import SamplingFilters, apply_sampling
from bebop.spec.tree.expect import expected_accepted
from bebop.spec.tree.grow import Frontier, TreeGrower, grow_tree
from bebop.spec.tree.spec import DraftTree, TreeBatch, TreeResult, TreeSpec
from bebop.spec.tree.verify import TreesResult, verify_tree, verify_trees

__all__ = [
    "RULES",
    "ChainResult",
    "ChainRule",
    "DraftScores",
    "DraftTree",
    "Frontier",
    "SamplingFilters",
    "StreamId",
    "Streams",
    "Tests",
    "TreeBatch",
    "TreeGrower",
    "TreeResult",
    "TreeSpec",
    "TreesResult",
    "Uniforms",
    "acceptance_ratio",
    "apply_sampling",
    "expected_accepted",
    "grow_tree",
    "invert",
    "residual",
    "sample",
    "verify_chain",
    "verify_tree",
    "verify_trees",
]
