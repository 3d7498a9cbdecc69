"""MTP heads: the module as an engine serves it, families, initialisation, reading and writing checkpoints."""

from bebop.mtp.checkpoint import checkpoint_checksums, checksum, trained_depth, write_checkpoint
from bebop.mtp.families import FAMILIES, MIMO, claimed_layers, family_of, is_head_name, known_family
from bebop.mtp.head import MtpHead, draft_hidden, head_state
from bebop.mtp.initialise import head_tensors, init_heads, load_heads
from bebop.mtp.mimo import MiMoForCausalLM

HEAD_PREFIX = MIMO.heads

__all__ = [
    "FAMILIES",
    "HEAD_PREFIX",
    "MiMoForCausalLM",
    "MtpHead",
    "checkpoint_checksums",
    "checksum",
    "claimed_layers",
    "draft_hidden",
    "family_of",
    "head_state",
    "head_tensors",
    "init_heads",
    "is_head_name",
    "known_family",
    "load_heads",
    "trained_depth",
    "write_checkpoint",
]
