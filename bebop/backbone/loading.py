"""The frozen backbone: a policy loaded to be read, never trained.

Packed documents are kept apart by unpacking them into right-padded rows of like length: no layer looks ahead, neither
attention nor the convolution and recurrence of a gated delta net, so padding needs no mask, and the fast kernels stay
in use. Positions run on through the padding: where they jump, transformers 5 takes a row for packed documents and
builds a [T, T] mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.errors import BadInput
from bebop.mtp.checkpoint import refuse_not_finite
from bebop.mtp.reading import Reading, decoder_class, read_policy

ROW_TOKENS = 8192  # padded tokens in one forward
PADDING_LOGIT = -1e4  # probability 0 in every type and at every temperature, and finite: 0 * it is 0 in an entropy


class Backbone:
    """A frozen policy. `.model` is the transformers model in eval mode, no parameter of it requires a gradient.

    reading: of its directory. num_ids: of its tokenizer; embeddings beyond are padding, which has no part in any
    probability.
    """

    def __init__(self, model: Any, reading: Reading) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config, self.reading, self.num_ids = model.config, reading, reading.num_ids
        mask_padding(self.model, self.num_ids)

    @property
    def embed_weight(self) -> Tensor:
        """[V, D] input embeddings."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_weight(self) -> Tensor:
        """[num_ids, D] output projection, without rows of padding; of the embeddings where the policy ties them."""
        return self.model.get_output_embeddings().weight[: self.num_ids]

    @property
    def tied(self) -> bool:
        """Whether the output projection is the embeddings."""
        return self.model.get_output_embeddings().weight is self.embed_weight

    @torch.no_grad()
    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states after the final norm, [T, D] in the model's dtype, of documents packed end to end.

        input_ids, position_ids: integer [T]; cu_seqlens: integer [B+1], 0 first and T last. No document sees another.
        Raises ValueError where the three do not fit together or an id is outside the vocabulary.
        """
        lengths = _checked_lengths(input_ids, position_ids, cu_seqlens, self.num_ids)
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

    Raises BadInput on a directory that `read_policy` refuses, and on weights that are not finite.
    """
    reading = read_policy(path)
    decoder = decoder_class(reading.config, reading.path, reading.shapes)
    model = decoder.from_pretrained(reading.path, dtype=dtype, attn_implementation="sdpa")
    refuse_not_finite(reading.path, model.named_parameters())
    return Backbone(model.to(device), reading)


def mask_padding(model: Any, num_ids: int) -> None:
    """Let a transformers model give no probability to the padding ids, those from num_ids on."""

    def mask(module: Any, inputs: Any, logits: Tensor) -> None:
        logits[..., num_ids:] = PADDING_LOGIT

    lm_head = model.get_output_embeddings()
    if num_ids < len(lm_head.weight):
        lm_head.register_forward_hook(mask)


def _checked_lengths(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, num_ids: int) -> list[int]:
    lengths = cu_seqlens.diff().tolist()
    total = len(input_ids)
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != total or min(lengths, default=0) < 1 or len(position_ids) != total:
        raise BadInput(
            f"cu_seqlens={cu_seqlens.tolist()} with {total} input_ids and {len(position_ids)} position_ids: expected "
            "rising bounds from 0 to the number of tokens, and one position for each token"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= num_ids:
        raise BadInput(f"input_ids between {low} and {high}: expected ids in [0, {num_ids})")
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
