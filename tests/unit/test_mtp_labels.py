"""Labels, packing and anchors: the mask shifts with its label, documents do not leak, horizons are whole."""

from __future__ import annotations

import pytest
import torch

from bebop.data import anchor_labels, anchors, mtp_labels, pack, target_index

MASK = [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("depth", "supervised"), [(0, [0, 0, 1, 1, 1, 0]), (1, [0, 1, 1, 1, 0, 0]), (2, [1, 1, 1, 0, 0, 0])]
)
def test_mask_shifts_with_its_label(depth, supervised):
    labels = mtp_labels(torch.arange(6) + 10, torch.tensor(MASK), torch.tensor([0, 6]), depth)
    assert (labels != -100).int().tolist() == supervised
    for t, label in enumerate(labels.tolist()):
        assert label in (-100, 10 + t + depth + 1)


def test_labels_stay_in_their_document():
    ids, cu_seqlens = torch.tensor([10, 11, 12, 20, 21]), torch.tensor([0, 3, 5], dtype=torch.int32)
    everything = torch.ones(5, dtype=torch.bool)
    assert mtp_labels(ids, everything, cu_seqlens, 0).tolist() == [11, 12, -100, 21, -100]
    assert mtp_labels(ids, everything, cu_seqlens, 1).tolist() == [12, -100, -100, -100, -100]
    assert mtp_labels(ids, everything, cu_seqlens, 9).tolist() == [-100] * 5


def test_bad_labels_input_is_named():
    ids, mask, cu = torch.arange(4), torch.ones(4), torch.tensor([0, 4])
    for argument, arguments in (
        ("depth", (ids, mask, cu, -1)),
        ("depth", (ids, mask, cu, 1.5)),
        ("input_ids", (ids.float(), mask, cu, 0)),
        ("input_ids", (ids[None], mask, cu, 0)),
        ("loss_mask", (ids, mask[:3], cu, 0)),
        ("cu_seqlens", (ids, mask, torch.tensor([0, 3]), 0)),
        ("cu_seqlens", (ids, mask, torch.tensor([0, 2, 2, 4]), 0)),
        ("cu_seqlens", (ids, mask, torch.tensor([1, 4]), 0)),
    ):
        with pytest.raises(ValueError, match=f"^{argument}.*expected"):
            mtp_labels(*arguments)


def test_pack_keeps_order_and_restarts_positions():
    batches = pack([([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1]), ([], []), ([6, 7, 8, 9], [0, 0, 1, 1])], 6)
    assert [b.input_ids.tolist() for b in batches] == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert batches[0].cu_seqlens.tolist() == [0, 3, 5]
    assert batches[0].position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batches[0].loss_mask.tolist() == [False, True, True, False, True]


def test_data_without_a_supervised_token_names_the_chat_template():
    with pytest.raises(ValueError, match=r"no supervised token in 2 sequences.*chat template"):
        pack([([1, 2], [0, 0]), ([3], [0])], 8)


def test_too_long_a_sequence_is_an_error_not_a_cut():
    with pytest.raises(ValueError, match=r"number 1 has 5 tokens, more than max_tokens=4; raise sft.batch_tokens"):
        pack([([1], [1]), ([1] * 5, [1] * 5)], 4)


def test_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match=r"number 0 has 2 ids and a loss mask of 3"):
        pack([([1, 2], [1, 1, 1])], 4)


def test_anchor_whose_horizon_leaves_the_supervised_span_is_dropped_whole():
    # A prompt of 3 and a response of 5, twice; the second response's third token is masked out.
    mask = [0, 0, 0, 1, 1, 1, 1, 1]
    holed = [0, 0, 0, 1, 1, 0, 1, 1]
    (batch,) = pack([(list(range(8)), mask), (list(range(8)), holed)], 16)
    # depth 3 at anchor t needs t+1..t+4 supervised: 2 (the last prompt token: 3..6) and 3 (4..7)
    assert anchors(batch, 3).tolist() == [2, 3]
    assert anchors(batch, 1).tolist() == [2, 3, 4, 5, 10, 13]
    assert anchors(batch, 5).tolist() == []


def test_targets_and_labels_shift_by_one_per_depth():
    (batch,) = pack([(list(range(100, 108)), [0, 0, 0, 1, 1, 1, 1, 1])], 16)
    at = anchors(batch, 3)
    assert target_index(at, 3).tolist() == [[3, 4], [4, 5], [5, 6]]
    assert anchor_labels(batch, at, 3).tolist() == [[104, 105], [105, 106], [106, 107]]
    for k in range(3):
        expected = mtp_labels(batch.input_ids, batch.loss_mask, batch.cu_seqlens, k + 1)[at]
        assert anchor_labels(batch, at, 3)[k].tolist() == expected.tolist()


@pytest.mark.parametrize("depth", [0, -1, 1.5, True])
def test_depth_must_be_a_positive_integer(depth):
    (batch,) = pack([([1, 2, 3], [1, 1, 1])], 16)
    with pytest.raises(ValueError, match=r"^depth="):
        anchors(batch, depth)
