"""The frozen backbone: a policy loaded to be read, never trained.

Packed documents are kept apart by unpacking them into right-padded rows of like length: no layer looks ahead, neither
attention nor the convolution and recurrence of a gated delta net, so padding needs no mask, and the fast kernels stay
in use. Positions run on through the padding: where they jump, transformers 5 takes a row for packed documents and
builds a [T, T] mask.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.mtp import family_of
from bebop.mtp.checkpoint import Tensors, read_config, refuse_biases
from bebop.mtp.families import decoder_config

ROW_TOKENS = 8192  # padded tokens in one forward


class Backbone:
    """A frozen policy. `.model` is the transformers model in eval mode, no parameter of it requires a gradient."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config

    @property
    def embed_weight(self) -> Tensor:
        """[V, D] input embeddings."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D] output projection; the embeddings themselves where the policy ties them."""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states after the final norm, [T, D] in the model's dtype, of documents packed end to end.

        input_ids, position_ids: integer [T]; cu_seqlens: integer [B+1], 0 first and T last. No document sees another.
        Raises ValueError where the three do not fit together or an id is outside the vocabulary.
        """
        lengths = _checked_lengths(input_ids, position_ids, cu_seqlens, self.config.vocab_size)
        hidden = self.embed_weight.new_empty(len(input_ids), self.config.hidden_size)
        starts = cu_seqlens.tolist()
        for documents in _rows(lengths):
            width = lengths[documents[0]]  # the longest comes first
            where = torch.arange(width, device=input_ids.device)
            begin = torch.tensor([starts[i] for i in documents], device=input_ids.device)
            length = torch.tensor([lengths[i] for i in documents], device=input_ids.device)
            index = begin[:, None] + torch.minimum(where, length[:, None] - 1)
            positions = position_ids[index] + (where - (length[:, None] - 1)).clamp(min=0)
            out = self.model.model(
                input_ids=input_ids[index], position_ids=positions, attention_mask=None, use_cache=False
            ).last_hidden_state
            inside = where < length[:, None]
            hidden[index[inside]] = out[inside]
        return hidden


def load_backbone(path: Path, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> Backbone:
    """Load the policy in `path` as a frozen backbone, by transformers' own class, without its MTP layers.

    Raises ValueError where there is none, or where its family is not one that bebop knows.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    path = Path(path)
    if not (path / "config.json").is_file():
        raise BadInput(f"policy {path}: no config.json there; expected a Hugging Face directory")
    raw = read_config(path)
    family, tensors = family_of(raw, path), Tensors(path)
    roots = family.roots(tensors, decoder_config(raw))
    stock = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(path))]
    refuse_biases(tensors, raw)
    known = getattr(stock, "_keys_to_ignore_on_load_unexpected", None) or []
    ignored = [*known, *map(re.escape, [*roots, *family.zero_biases(tensors, decoder_config(raw))])]
    # In the class's own module, where transformers looks up what its code supports.
    decoder = type(
        stock.__name__, (stock,), {"_keys_to_ignore_on_load_unexpected": ignored, "__module__": stock.__module__}
    )
    model = decoder.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    return Backbone(model.to(device))


def _checked_lengths(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, vocab_size: int) -> list[int]:
    lengths = cu_seqlens.diff().tolist()
    total = len(input_ids)
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != total or min(lengths, default=0) < 1 or len(position_ids) != total:
        raise BadInput(
            f"cu_seqlens={cu_seqlens.tolist()} with {total} input_ids and {len(position_ids)} position_ids: expected "
            "rising bounds from 0 to the number of tokens, and one position for each token"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise BadInput(f"input_ids between {low} and {high}: expected ids in [0, {vocab_size})")
    return lengths


def _rows(lengths: list[int]) -> list[list[int]]:
    """Documents by falling length, in groups whose padded size stays under ROW_TOKENS."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        last = groups[-1] if groups else []
        width = lengths[last[0]] if last else 0
        if last and width < 2 * lengths[i] and (len(last) + 1) * width <= ROW_TOKENS:
            last.append(i)
        else:
            groups.append([i])
    return groups
