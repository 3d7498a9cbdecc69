"""The training sequences of a run: batches for any step, held-out batches, and the range of their entropies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from bebop.acceptance.scores import sequence_entropies
from bebop.backbone import Backbone
from bebop.backbone.hidden_states import HiddenStates
from bebop.data.batches import IndexedBatch, TrainBatch, pack_rows, trainable
from bebop.data.self_distill import META, read_rows
from bebop.sft.lr import BatchStream
from bebop.store.files import read_json

ENTROPY_SEQUENCES = 512  # training sequences in the recorded range of entropies, in addition to all held-out ones


class TextData:
    """stream: micro-batches of any step; heldout: batches for scoring; hidden: adds hidden states to a micro-batch;
    left_out: what was given or asked and is not in them, counted by reason."""

    def __init__(
        self,
        text_dir: Path,
        backbone: Backbone,
        *,
        depth: int,
        batch_tokens: int,
        seed: int,
        cache_hidden: str,
        policy: str,
    ) -> None:
        """cache_hidden: of the training sequences, see HiddenStates; held-out ones stay in memory, or stream.
        policy: name of the policy's content; cached states of another one are not used."""
        self.left_out = Counter[str](read_json(text_dir / META).get("left_out", {}))
        train = trainable(read_rows(text_dir / "train.parquet"), depth, "training text", self.left_out)
        heldout = trainable(read_rows(text_dir / "heldout.parquet"), depth, "held-out text", self.left_out)
        self.num_sequences = len(train)
        self.num_tokens = sum(len(row.input_ids) for row in train)
        self.stream: BatchStream[IndexedBatch] = BatchStream(
            len(train), seed, lambda order: pack_rows(train, order, batch_tokens, depth)
        )
        self.hidden = HiddenStates(
            backbone,
            train,
            batch_tokens,
            name="training text",
            how=cache_hidden,
            file=text_dir / f"hidden_depth{depth}.bin",
            identity=policy,
        )
        heldout_how = "stream" if cache_hidden == "stream" else "memory"
        self._heldout_hidden = HiddenStates(backbone, heldout, batch_tokens, name="held-out text", how=heldout_how)
        self._heldout = pack_rows(heldout, range(len(heldout)), batch_tokens, depth)
        self._first = pack_rows(train, range(min(ENTROPY_SEQUENCES, len(train))), batch_tokens, depth)
        self._heldout_rows, self._batch_tokens, self._depth = heldout, batch_tokens, depth
        self._lm_head = backbone.lm_head_weight

    def heldout(self) -> Iterator[TrainBatch]:
        for batch in self._heldout:
            yield self._heldout_hidden.batch(batch)

    def heldout_by_task(self) -> Iterator[tuple[str, Iterator[TrainBatch]]]:
        """The held-out batches of each task."""
        tasks = [row.task for row in self._heldout_rows]
        for task in sorted(set(tasks)):
            own = [i for i, name in enumerate(tasks) if name == task]
            packed = pack_rows(self._heldout_rows, own, self._batch_tokens, self._depth)
            yield task, (self._heldout_hidden.batch(batch) for batch in packed)

    def entropy(self, temperature: float) -> dict[str, float | list[float]]:
        """Target entropies in nats: mean over held-out sequences, and the smallest and largest mean of one sequence."""
        heldout = list(self._entropies(self._heldout_hidden, self._heldout, temperature))
        every = heldout + list(self._entropies(self.hidden, self._first, temperature))
        return {"entropy_nats": sum(heldout) / len(heldout), "entropy_range": [min(every), max(every)]}

    def _entropies(self, hidden: HiddenStates, batches: list[IndexedBatch], temperature: float) -> list[float]:
        pairs: Iterator[tuple[TrainBatch, Tensor]] = ((hidden.batch(b), b.packed.loss_mask) for b in batches)
        return sequence_entropies(pairs, self._lm_head.float(), temperature=temperature)
