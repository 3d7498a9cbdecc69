"""The sampling rules of speculative decoding as functions of probabilities; no model code (see rules.py, chain.py)."""

from bebop.spec.chain import ChainResult, Rule, verify_chain
from bebop.spec.rules import acceptance_ratio, overlap, residual, residual_without

__all__ = ["ChainResult", "Rule", "acceptance_ratio", "overlap", "residual", "residual_without", "verify_chain"]
