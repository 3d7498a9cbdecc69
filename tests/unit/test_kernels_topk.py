"""topk against a stable sort: order, ties, zeros of both signs, infinities, NaN."""

from __future__ import annotations

import bebop_kernels as bk
import pytest
import torch
from bebop_kernels.topk import naive

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
IMPLEMENTATIONS = ["reference", "cpu"]
CASES = [(impl, dtype) for impl in IMPLEMENTATIONS for dtype in DTYPES] + [("reference", torch.float64)]


def normal(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_as_sorted(logits: torch.Tensor, k: int, impl: str) -> None:
    values, ids = bk.topk(logits, k, impl=impl)
    expected_values, expected_ids = naive.topk(logits.double(), k)
    assert torch.equal(ids, expected_ids)
    assert values.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert torch.equal(values.double(), expected_values)


@pytest.mark.parametrize(("impl", "dtype"), CASES)
@pytest.mark.parametrize(("rows", "vocab", "k"), [(3, 5, 5), (2, 700, 128), (11, 8193, 128), (9, 49152, 100)])
def test_order_is_that_of_a_stable_sort(impl, dtype, rows, vocab, k):
    assert_as_sorted(normal(rows, vocab, dtype), k, impl)


@pytest.mark.parametrize(("impl", "dtype"), CASES)
def test_equal_logits_are_ordered_by_lowest_id(impl, dtype):
    logits = normal(4, 9000, dtype)
    for tied in (logits.round(), logits.sign(), logits * 0, -logits.abs() * 0):
        assert_as_sorted(tied, 128, impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_high_logits_in_neighbouring_chunks_are_sorted(impl):
    """They fill whole chunks, so far more than k elements reach the bound from the chunk maxima."""
    logits = normal(2, 30_000, torch.float32)
    logits[0, 500:4000] += 100
    logits[1, -2000:] += 100
    assert_as_sorted(logits, 128, impl)


@pytest.mark.parametrize(("impl", "dtype"), CASES)
def test_rows_with_infinities_and_only_negative_logits(impl, dtype):
    logits = -normal(5, 9000, dtype).abs() - 1
    logits[0, 7::3] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 8000] = torch.inf
    logits[3, :8900] = -torch.inf  # fewer than k finite logits
    assert_as_sorted(logits, 128, impl)


@pytest.mark.parametrize(("impl", "dtype"), CASES)
@pytest.mark.parametrize("vocab", [300, 9000])
def test_nan_is_first_in_its_row_and_nowhere_else(impl, dtype, vocab):
    logits = normal(3, vocab, dtype)
    logits[0, 200] = torch.nan
    logits[2, 100] = -torch.tensor(torch.nan, dtype=dtype)  # a NaN may carry a sign
    values, _ = bk.topk(logits, 128, impl=impl)
    assert values[:, 0].isnan().tolist() == [True, False, True]
    assert_as_sorted(logits[1:2], 128, impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strided_views_and_empty_inputs(impl):
    wide = normal(6, 18_000, torch.bfloat16)
    assert_as_sorted(wide[:, ::2], 100, impl)
    assert_as_sorted(wide.T[:9000].T[1:4], 100, impl)
    values, ids = bk.topk(wide[:0], 100, impl=impl)
    assert values.shape == ids.shape == (0, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 4), 5), r"k: got 5, expected an integer in \[1, V = 4\]"),
        ((torch.zeros(2, 4), 0), "k: got 0"),
        ((torch.zeros(4), 2), r"logits: got shape \[4\], expected \[N, V\]"),
        ((torch.zeros(2, 4).long(), 2), "logits: got dtype torch.int64"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        bk.topk(*arguments)
    with pytest.raises(ValueError, match=r"triton.*GPU"):
        bk.topk(torch.zeros(2, 4), 2, impl="triton")
