"""The sampling rules of speculative decoding as functions of probabilities; no model code.

rules.py the formulas, chain.py chains, tree*.py trees, warp.py logits to probabilities, streams.py and draws.py random
numbers and draws, emit.py what a request keeps.
"""

from bebop.spec.chain import ChainResult, Rule, verify_chain
from bebop.spec.draws import Sampler, gumbel_max, invert, sample
from bebop.spec.emit import keep_until_stop
from bebop.spec.random import Purpose, Streams, Uniforms
from bebop.spec.rules import acceptance_ratio, overlap, residual, residual_without
from bebop.spec.sampling import token_logprobs, warp
from bebop.spec.tree.expect import expected_accepted
from bebop.spec.tree.grow import Frontier, TreeGrower, grow_tree
from bebop.spec.tree.spec import DraftTree, TreeBatch, TreeResult, TreeSpec
from bebop.spec.tree.verify import TreesResult, verify_tree, verify_trees

__all__ = [
    "ChainResult",
    "DraftTree",
    "Frontier",
    "Purpose",
    "Rule",
    "Sampler",
    "Streams",
    "TreeBatch",
    "TreeGrower",
    "TreeResult",
    "TreeSpec",
    "TreesResult",
    "Uniforms",
    "acceptance_ratio",
    "expected_accepted",
    "grow_tree",
    "gumbel_max",
    "invert",
    "keep_until_stop",
    "overlap",
    "residual",
    "residual_without",
    "sample",
    "token_logprobs",
    "verify_chain",
    "verify_tree",
    "verify_trees",
    "warp",
]
