"""What the heads' loss reads and where its gradient goes: masks, horizon, accumulation, and a backbone left alone."""

import pytest
import torch
from torch import nn

from bebop.config import Loss
from bebop.data.batches import TrainBatch, pack_rows, trainable
from bebop.data.self_distill import TextRow
from bebop.head_training.objective import HeadObjective
from bebop.losses import LOSSES
from bebop.mtp import load_heads

DEPTH, VOCAB = 3, 64


def _row(prompt, response, mask=None):
    mask = mask or [1] * len(response)
    return TextRow(f"r/{prompt[0]}", "r", tuple(prompt), tuple(response), tuple(mask))


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    return [_row(draw(3), draw(n)) for n in (5, 9, 14, 7, 20)]


@pytest.fixture(scope="module")
def frozen(tiny_random):
    """Random embedding and lm_head of the head's width."""
    width = load_heads(tiny_random).config.hidden_size
    generator = torch.Generator().manual_seed(1)
    return torch.randn(VOCAB, width, generator=generator), torch.randn(VOCAB, width, generator=generator) / 4


def _batches(rows, max_tokens, width):
    """Train batches whose hidden states depend on sequence and position alone."""
    made = []
    for indexed in pack_rows(rows, range(len(rows)), max_tokens, DEPTH):
        packed = indexed.packed
        states = [
            torch.randn(len(rows[i].input_ids), width, generator=torch.Generator().manual_seed(100 + i))
            for i in indexed.sequences
        ]
        made.append(
            TrainBatch(
                torch.cat(states),
                packed.input_ids,
                packed.cu_seqlens,
                packed.position_ids,
                indexed.anchors,
                indexed.target_index,
                packed.input_ids[indexed.target_index + 1],
            )
        )
    return made


def test_only_supervised_tokens_are_ever_predicted():
    """Two turns: the second turn's prompt, inside the response, is read but never a label."""
    row = _row([1, 2, 3], [10, 11, 12, 13, 14, 50, 51, 20, 21, 22, 23], [1] * 5 + [0] * 2 + [1] * 4)
    (batch,) = pack_rows([row], [0], 64, DEPTH)
    labels = row_labels(batch)
    assert not {50, 51} & set(labels.flatten().tolist())
    assert labels[:, 0].tolist() == [11, 12, 13]  # the anchor is the prompt's last token, before 10
    assert labels[:, -1].tolist() == [21, 22, 23]


def row_labels(batch):
    return batch.packed.input_ids[batch.target_index + 1]


def test_sequences_without_room_for_the_horizon_are_left_out(caplog):
    good, short, empty = _row([1], [2, 3, 4, 5]), _row([6], [7, 8, 9]), _row([5], [])
    with caplog.at_level("INFO"):
        assert trainable([short, good, empty], DEPTH, "text") == [good]
    assert "2 of 3 sequences" in caplog.text
    with pytest.raises(ValueError, match=r"0 of 2 sequences have the 4 supervised tokens in a row"):
        trainable([short, empty], DEPTH, "text")


@pytest.mark.parametrize("name", LOSSES)
def test_packing_and_accumulation_leave_loss_and_gradient_as_they_are(name, rows, frozen, tiny_random):
    """One batch of all sequences, or many uneven ones weighted by their anchors."""
    grads, losses = [], []
    for max_tokens in (1000, 24):
        objective = HeadObjective(load_heads(tiny_random), *frozen, DEPTH, Loss(name=name))
        batches = _batches(rows, max_tokens, frozen[0].shape[1])
        total = sum(batch.anchors.numel() for batch in batches)
        loss = sum(objective(batch)[0] * (batch.anchors.numel() / total) for batch in batches)
        loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in objective.parameters()]))
        losses.append(loss.item())
    assert len({batch.anchors.numel() for batch in batches}) > 1
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert torch.allclose(grads[0], grads[1], atol=1e-6 * grads[0].abs().max().item() + 1e-8)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_reaches_the_heads_alone(name, tied, rows, frozen, tiny_random):
    """The loss must not move hidden states, embedding or lm_head, also where the two are one matrix."""
    embed = nn.Parameter(frozen[0].clone())
    lm_head = embed if tied else nn.Parameter(frozen[1].clone())
    objective = HeadObjective(load_heads(tiny_random), embed, lm_head, DEPTH, Loss(name=name))
    (batch,) = _batches(rows, 1000, embed.shape[1])
    batch.hidden.requires_grad_()
    objective(batch)[0].backward()
    for outside in (embed, lm_head, batch.hidden):
        assert outside.grad is None or not outside.grad.any()
    assert all(p.grad is not None and p.grad.any() for name, p in objective.named_parameters() if "bias" not in name)
    assert {name.split(".")[0] for name, _ in objective.named_parameters()} == {"head"}


def test_ten_steps_move_the_heads_and_nothing_else(rows, frozen, tiny_random):
    embed, lm_head = (weight.clone() for weight in frozen)
    objective = HeadObjective(load_heads(tiny_random), embed, lm_head, DEPTH, Loss())
    before = [p.detach().clone() for p in objective.parameters()]
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3)
    (batch,) = _batches(rows, 1000, embed.shape[1])
    losses = []
    for _ in range(10):
        loss, alpha = objective(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert alpha.shape == (DEPTH,)
    assert losses[-1] < losses[0]
    assert torch.equal(embed, frozen[0]) and torch.equal(lm_head, frozen[1])
    assert all(not torch.equal(b, p) for b, p in zip(before, objective.parameters(), strict=True))
