"""Learning rate, losses and the data's order are functions of the step alone."""

import pytest

from bebop.config import Loss, Sft
from bebop.sft.lr import BatchStream, loss_at, lr_at, mine, regression_at


def test_learning_rate_rises_then_stays():
    sft = Sft(steps=100, lr=2.0, lr_warmup_share=0.1, lr_schedule="constant")
    assert [lr_at(step, sft) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert {lr_at(step, sft) for step in range(9, 100)} == {2.0}


def test_cosine_falls_from_the_peak_to_almost_zero():
    sft = Sft(steps=100, lr=1.0, lr_warmup_share=0.1, lr_schedule="cosine")
    after = [lr_at(step, sft) for step in range(10, 100)]
    assert after[0] == pytest.approx(1.0)
    assert after == sorted(after, reverse=True)
    assert 0 < after[-1] < 1e-3


def test_no_warm_up_starts_at_the_peak():
    assert lr_at(0, Sft(steps=10, lr=1.0, lr_warmup_share=0.0)) == 1.0


def test_warm_up_loss_takes_the_first_share_of_the_steps():
    loss = Loss(name="e2e_tv", warmup="lk", warmup_share=0.3)
    assert [loss_at(step, 10, loss) for step in range(10)] == ["lk"] * 3 + ["e2e_tv"] * 7
    assert {loss_at(step, 10, Loss(name="kl", warmup=None)) for step in range(10)} == {"kl"}


def test_regression_comes_first_with_a_schedule_of_its_own():
    sft = Sft(steps=10, regression_steps=4, lr=1.0, lr_warmup_share=0.0)
    parts = [regression_at(step, sft) for step in range(14)]
    assert [(part.steps, at) for part, at in parts] == [(4, s) for s in range(4)] + [(10, s) for s in range(10)]
    rates = [lr_at(at, part) for part, at in parts]
    assert rates[0] == rates[4] == 1.0 and rates[3] < rates[4] and rates[13] < 0.1


def _pairs(order):
    """Two sequences a micro-batch, the odd one alone."""
    return [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]


def test_every_epoch_reads_every_sequence_once_in_another_order():
    stream = BatchStream(5, seed=0, pack=_pairs)
    epochs = [[i for m in range(3) for i in stream.micro_batch(3 * e + m)] for e in range(4)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_is_the_same_from_any_start():
    """A resumed run reads what the uninterrupted run would have read."""
    whole = [BatchStream(7, seed=3, pack=_pairs).step(step, 3, 1) for step in range(6)]
    one = BatchStream(7, seed=3, pack=_pairs)
    assert whole == [one.step(step, 3, 1) for step in range(6)]
    assert whole != [BatchStream(7, seed=4, pack=_pairs).step(step, 3, 1) for step in range(6)]


def test_processes_share_a_step_like_accumulated_micro_batches():
    stream = BatchStream(9, seed=0, pack=_pairs)
    alone, together = stream.step(2, 4, 1), stream.step(2, 2, 2)
    assert alone == together
    shares = [mine(together, rank, 2) for rank in (0, 1)]
    assert sorted(shares[0] + shares[1]) == sorted(alone)
    assert len(shares[0]) == len(shares[1]) == 2


def test_a_stream_without_sequences_is_refused():
    with pytest.raises(ValueError, match="num_sequences: got 0"):
        BatchStream(0, seed=0, pack=_pairs)
