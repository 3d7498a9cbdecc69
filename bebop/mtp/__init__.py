"""MTP heads: the module as an engine serves it, its initialisation, and its way in and out of checkpoints."""

from bebop.mtp.checkpoint import checkpoint_checksums, checksum, write_checkpoint
from bebop.mtp.head import HEAD_PREFIX, MtpHead, draft_hidden, head_state
from bebop.mtp.initialise import init_heads, load_heads

__all__ = [
    "HEAD_PREFIX",
    "MtpHead",
    "checkpoint_checksums",
    "checksum",
    "draft_hidden",
    "head_state",
    "init_heads",
    "load_heads",
    "write_checkpoint",
]
