"""The frozen backbone's hidden states of a set of rows: in memory, in a file, or computed with each batch.

They are the same in every epoch, so computing them once saves a backbone forward per batch:

| data.cache_hidden | costs                                             | for                                      |
|-------------------|---------------------------------------------------|------------------------------------------|
| memory            | tokens * width * bytes, in every process          | data that fits                           |
| disk              | the same on disk once, mapped by every process    | many epochs of large data, several runs  |
| stream            | a backbone forward with every batch               | one or two epochs                        |

Before anything is computed, the size is logged and compared with the free memory or disk. The file is written whole or
not at all, and under a lock, so that two runs make it only once. States are stored in the backbone's dtype and returned
in float32, which is exact.
"""

from __future__ import annotations

import itertools
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.backbone import Backbone
from bebop.data.batches import IndexedBatch, TrainBatch, pack_rows, train_batch
from bebop.data.self_distill import TextRow
from bebop.errors import BadInput
from bebop.store.caches import name_of, versions
from bebop.store.files import file_lock, human_size, read_json, remove_leftovers, replacing, write_json

log = logging.getLogger(__name__)
MEMINFO = Path("/proc/meminfo")
SHARE = 0.8  # largest share of the free memory or disk that the states may take


@dataclass(frozen=True)
class HiddenInputs:
    """What hidden states are computed from, beside their shape and type."""

    ids: Sequence[Sequence[int]]  # of every row
    policy: str  # name of its content
    versions: Mapping[str, str]


class HiddenStates:
    """The hidden states of rows, wherever they are stored. They depend only on data, policy and `how`."""

    def __init__(
        self,
        backbone: Backbone,
        rows: Sequence[TextRow],
        max_tokens: int,
        *,
        name: str,
        how: Literal["memory", "disk", "stream"] = "memory",
        file: Path | None = None,
        identity: str = "",
    ) -> None:
        """max_tokens: of one backbone forward. name: what the rows are, for messages. file: where how="disk" keeps
        them; identity: stands for the policy there, a file of another identity or of other rows is made again.

        Raises ValueError where they do not fit.
        """
        self._backbone, self._device = backbone, backbone.embed_weight.device
        self._width, self._dtype = backbone.embed_weight.shape[1], backbone.embed_weight.dtype
        lengths = [len(row.input_ids) for row in rows]
        self._bounds = list(itertools.accumulate(lengths, initial=0))
        size = self._bounds[-1] * self._width * self._dtype.itemsize
        self._states: Tensor | None = None  # [tokens, D] on the CPU
        if how == "stream":
            log.info("%s: the backbone runs with every batch; its states would take %s", name, human_size(size))
        elif how == "memory":
            processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
            _check_room(name, how, size * processes, _free_memory())
            log.info("%s: hidden states of %d tokens are kept in memory, %s", name, self._bounds[-1], human_size(size))
            self._states = torch.empty(self._bounds[-1], self._width, dtype=self._dtype)
            self._fill(self._states, rows, max_tokens)
        elif file is None:
            raise BadInput(f"file: got None with how={how!r}, expected the path of the file for the states")
        else:
            self._states = self._mapped(file, rows, max_tokens, name, size, identity)

    def batch(self, indexed: IndexedBatch) -> TrainBatch:
        """The batch with its hidden states, on the backbone's device."""
        if self._states is None:
            hidden = self._compute(indexed)
        else:
            parts = [self._states[self._bounds[i] : self._bounds[i + 1]] for i in indexed.sequences]
            hidden = torch.cat(parts).to(self._device)
        return train_batch(indexed, hidden.float())

    def _fill(self, states: Tensor, rows: Sequence[TextRow], max_tokens: int) -> None:
        done, quiet = 0, torch.distributed.is_initialized() and torch.distributed.get_rank() != 0
        with tqdm(total=len(states), desc="hidden states", unit="token", leave=False, disable=quiet) as bar:
            for batch in pack_rows(rows, range(len(rows)), max_tokens, depth=1):
                hidden = self._compute(batch)
                states[done : done + len(hidden)] = hidden.cpu()
                done += len(hidden)
                bar.update(len(hidden))

    def _mapped(
        self, file: Path, rows: Sequence[TextRow], max_tokens: int, name: str, size: int, identity: str
    ) -> Tensor:
        """The states in `file`. Rank 0 makes the file first if it is not complete."""
        inputs = HiddenInputs([row.input_ids for row in rows], identity, versions("torch", "transformers"))
        meta = {
            "made_from": name_of(inputs),
            "shape": [self._bounds[-1], self._width],
            "dtype": str(self._dtype),
        }
        about = file.with_suffix(".json")
        distributed = torch.distributed.is_initialized()
        if not distributed or torch.distributed.get_rank() == 0:
            with file_lock(file.with_suffix(".lock")):
                whole = read_json(about) == meta
                whole = (
                    whole and file.is_file() and file.stat().st_size == size
                )  # the description may be left without its file
                how = "are read from" if whole else "go to"
                log.info("%s: hidden states %s %s, %s", name, how, file, human_size(size))
                if not whole:
                    remove_leftovers(file)
                    _check_room(name, "disk", size, shutil.disk_usage(file.parent).free)
                    about.unlink(missing_ok=True)
                    with replacing(file) as part:
                        self._fill(self._map(part, shared=True), rows, max_tokens)
                    write_json(about, meta)
        if distributed and torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()
        return self._map(file, shared=False)

    def _map(self, file: Path, *, shared: bool) -> Tensor:
        """[tokens, D] of a file, which is made where it is shared."""
        shape = self._bounds[-1], self._width
        return torch.from_file(str(file), shared=shared, size=math.prod(shape), dtype=self._dtype).view(shape)

    @torch.no_grad()
    def _compute(self, indexed: IndexedBatch) -> Tensor:
        packed, device = indexed.packed, self._device
        return self._backbone.hidden(
            packed.input_ids.to(device), packed.position_ids.to(device), packed.cu_seqlens.to(device)
        )


def _check_room(name: str, how: str, size: int, free: int | None) -> None:
    if free is not None and size > SHARE * free:
        other = {"memory": "disk or stream", "disk": "stream"}[how]
        raise BadInput(
            f"data.cache_hidden={how}: hidden states of the {name} need {human_size(size)}, "
            f"{human_size(free)} are free; "
            f"set data.cache_hidden={other}"
        )


def _free_memory() -> int | None:
    """Bytes of memory that are free for use (Linux), or None."""
    if not MEMINFO.exists():
        return None
    line = next((line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:")), None)
    return int(line.split()[1]) * 1024 if line else None
