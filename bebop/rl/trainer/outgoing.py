"""The policy's tensors as the trainer sends and saves them: with the names and shapes of the original checkpoint.

transformers 5 stacks experts in memory and renames a model's text part, while engines and users know the checkpoint's
names. So each tensor passes through transformers' own reverse conversion, which `save_pretrained` uses. A tied tensor
is sent once, under the name that transformers ties the others to: vLLM refuses a copy that arrives in another bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bebop.engines.weights import Layout
from bebop.errors import BadInput
from bebop.mtp.checkpoint import Tensors


class Outgoing:
    """Tensors of `module`, transformers' model under FSDP2, which was loaded from the directory of `layout`.

    heads: the tensors of the MTP layers by name, as they are in the directory, without copies of others.
    Raises ValueError before anything is sent if a tensor is not in the directory, or has another shape there.
    """

    def __init__(self, module: Any, layout: Layout) -> None:
        self.module, self.layout = module, layout
        self.source = Tensors(layout.path)
        self.tied: dict[str, str] = dict(getattr(module, "all_tied_weights_keys", {}))  # copy -> original
        self.heads = {name: self.source[name] for name in sorted(layout.heads - layout.copies)}
        for name, tensor in self._held():
            for known, part in self._in_source_form(name, torch.empty(tensor.shape, device="meta")):
                if tuple(part.shape) != layout.shapes[known]:
                    raise BadInput(
                        f"{known}: the trainer holds {list(part.shape)}, {layout.path} has {list(layout.shapes[known])}"
                    )

    def backbone(self, device: Any, least: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor outside the MTP layers, whole, once; all ranks must iterate over it together.

        Values have the directory's own type, or `least` if that is more precise.
        """
        for name, tensor in self._held():
            whole = tensor.to(device, non_blocking=True).full_tensor() if isinstance(tensor, DTensor) else tensor
            for known, part in self._in_source_form(name, whole):
                dtype = torch.promote_types(self.layout.dtypes[known], least)
                yield known, part.to(dtype).contiguous()

    def copies(self, known: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tied tensor's other names in the directory, which a new checkpoint needs too."""
        for copy, original in self.tied.items():
            if original == known and copy in self.layout.shapes:
                yield copy, tensor

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self.module.state_dict().items() if name not in self.tied)

    def _in_source_form(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        turned = revert_weight_conversion(self.module, {name: tensor})
        if turned.keys() <= self.layout.shapes.keys():
            yield from turned.items()
        elif name in self.layout.shapes:
            yield name, tensor
        else:
            raise BadInput(f"{name}: {self.layout.path} has no tensor of this name, nor {next(iter(turned))}")
