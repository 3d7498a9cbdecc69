"""Peak memory of one training step of the heads, forward and backward; each measurement runs in its own process.

Same shapes on both sides: one document, N anchors, depth K, width D, vocabulary V, float32. The step at a vocabulary of
`SMALL_VOCAB` shows what the head's own layer takes; the rest is the loss. The unit [N, V] is one float32 matrix of
logits of one depth: a loss that keeps its logits for backward needs at least K of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SMALL_VOCAB = 256
WARM_ANCHORS = 8
SIDES = ("bebop", "speculators")


@dataclass(frozen=True)
class Peak:
    """peak_mib: above what the process held before the step; loss_mib: the same without the head's own share."""

    side: str
    vocab_size: int
    anchors: int
    depth: int
    width: int
    peak_mib: float
    loss_mib: float
    logits: float  # loss_mib in units of one [N, V] matrix


def measure(vocab_sizes: list[int], *, anchors: int, depth: int, width: int) -> list[Peak]:
    """Both sides at every vocabulary, in turn."""
    shape = {"anchors": anchors, "depth": depth, "width": width}
    own = {side: _in_process(side, SMALL_VOCAB, shape) for side in SIDES}
    peaks = []
    for vocab_size in vocab_sizes:
        for side in SIDES:
            peak = _in_process(side, vocab_size, shape)
            loss = peak - own[side]
            unit = anchors * vocab_size * 4
            peaks.append(
                Peak(side, vocab_size, anchors, depth, width, peak / 2**20, loss / 2**20, round(loss / unit, 2))
            )
    return peaks


def _in_process(side: str, vocab_size: int, shape: dict[str, int]) -> int:
    command = [sys.executable, __file__, json.dumps({"side": side, "vocab_size": vocab_size, **shape})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"memory of {side} at V={vocab_size}: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.strip().splitlines()[-1])


def main(words: str) -> None:
    job = json.loads(words)
    side, shape = job.pop("side"), job
    step = {"bebop": _bebop, "speculators": _speculators}[side]
    run = step(**shape)
    run(WARM_ANCHORS)
    base = _reset()
    run(shape["anchors"])
    print(_peak() - base)


def _bebop(vocab_size: int, anchors: int, depth: int, width: int) -> Any:
    from bebop.config import Loss
    from bebop.data.batches import TrainBatch
    from bebop.data.packing import anchor_labels, pack, target_index
    from bebop.data.packing import anchors as anchors_of
    from bebop.head_training.objective import HeadObjective
    from bebop.mtp import MtpHead, family_of

    config = _config(vocab_size, width)
    head = MtpHead(family_of(config.to_dict()), config).to(_device())
    embed, lm_head = (torch.randn(vocab_size, width, device=_device()) for _ in range(2))
    objective = HeadObjective(head, embed, lm_head, depth, Loss())

    def run(count: int) -> None:
        ids, hidden = _text(count, depth, vocab_size, width)
        packed = pack([(ids, [1] * len(ids))], len(ids))
        where = anchors_of(packed[0], depth)
        if len(where) != count:
            raise RuntimeError(f"anchors: {len(where)}, expected {count}")
        labels = anchor_labels(packed[0], where, depth)
        one = packed[0]
        parts = (hidden, one.input_ids, one.cu_seqlens, one.position_ids, where, target_index(where, depth), labels)
        loss, _ = objective(TrainBatch(*(part.to(_device()) for part in parts)))
        loss.backward()

    return run


def _speculators(vocab_size: int, anchors: int, depth: int, width: int) -> Any:
    import baseline

    model = baseline.empty(_config(vocab_size, width), depth).to(_device())
    weights = model.get_trainer_kwargs(num_speculative_steps=depth)[0]

    def run(count: int) -> None:
        ids, hidden = _text(count, depth, vocab_size, width)
        input_ids = torch.tensor(ids, device=_device())[None]
        _, loss, _ = model(
            input_ids=input_ids,
            hidden_states=hidden.to(_device())[None],
            loss_mask=torch.ones_like(input_ids),
            position_ids=torch.arange(len(ids), device=_device())[None],
            **weights,
        )
        loss.backward()

    return run


def _config(vocab_size: int, width: int) -> Any:
    from bebop.policies.random_family import family_config

    return family_config(
        "qwen3_5_text",
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=2,
        num_heads=4,
        intermediate_size=2 * width,
        end_id=0,
        pad_id=0,
    )


def _text(count: int, depth: int, vocab_size: int, width: int) -> tuple[list[int], torch.Tensor]:
    total = count + depth + 1
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (total,), generator=generator).tolist()
    return ids, torch.randn(total, width, generator=generator)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _reset() -> int:
    """Reset the peak; returns the bytes held now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def _status(key: str) -> int:
    """Bytes of a line of /proc/self/status, which has KiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def as_rows(peaks: list[Peak]) -> list[dict[str, Any]]:
    return [asdict(peak) for peak in peaks]


if __name__ == "__main__":
    main(sys.argv[1])
