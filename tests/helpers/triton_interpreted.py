"""The Triton kernels in Triton's interpreter, forward and backward, against the reference and a float64 oracle.

The interpreter must be selected before triton is imported, so test_kernels_triton runs this file in a process of its
own, with TRITON_INTERPRET=1. To run it alone: `TRITON_INTERPRET=1 pytest tests/helpers/triton_interpreted.py`.
"""

from __future__ import annotations

import itertools
from functools import partial

import bebop_kernels as bk
import kernel_cases
import oracle
import pytest
import torch
from kernel_cases import pair

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


alpha_and_grad = partial(kernel_cases.alpha_and_grad, impl="triton")
assert_equal = partial(kernel_cases.assert_like_reference, "triton")
check_statistics = partial(kernel_cases.assert_statistics_like_reference, "triton", tolerance=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, vocab", [(1, 2), (11, 401), (2, 5001)])
def test_overlap_and_its_gradient(rows, vocab, dtype):
    assert_equal(*pair(rows, vocab, dtype), temperature=0.7)


def test_draft_and_target_of_different_types():
    draft, target = pair(3, 300)
    assert_equal(draft.bfloat16(), target)
    assert_equal(draft, target.half(), temperature=1.5)


def test_equal_rows_have_a_gradient_of_exactly_zero():
    for vocab in (300, 5001):
        draft, _ = pair(2, vocab)
        alpha, grad = assert_equal(draft, draft.clone())
        assert (grad == 0).all()
        torch.testing.assert_close(alpha, torch.ones(2))


def test_a_common_shift_of_a_thousand_changes_no_sign():
    draft, target = pair(4, 2000, noise=1e-3)
    # The shifted logits are exact, so any difference is the rounding of the kernel.
    draft, target = ((x * 2**10).round() / 2**10 for x in (draft, target))
    grads = [alpha_and_grad(draft + shift, target + shift)[1] for shift in (0.0, 1000.0, -1000.0)]
    assert (grads[0] != 0).any()
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], atol=0, rtol=0)


class TestMinusInfinity(kernel_cases.MinusInfinity):
    impl, grad_atol, tolerance = "triton", 1e-6, 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab", [(5, 57), (2, 6001)])
def test_statistics(rows, vocab, dtype):
    check_statistics(*pair(rows, vocab, dtype), 0.6)


def test_argmax_is_the_first_maximum_also_in_a_later_split():
    draft, target = pair(1, 9001)
    draft[0, 8000] = draft[0, 8500] = 50.0
    got = bk.tv_statistics(draft, target, impl="triton").target_prob_of_draft_argmax
    torch.testing.assert_close(got, target.softmax(-1)[:, 8000])
    assert bk.tv_statistics(draft, target).target_logprob is None


def linear_inputs(dtype=torch.float32, anchors=9, vocab=37, width=6, noise=0.3):
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(anchors + 3, width, generator=generator)
    index = torch.arange(1, 4)[:, None] + torch.arange(anchors)
    draft = target[index] + noise * torch.randn(3, anchors, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    return draft.to(dtype), target.to(dtype), weight.to(dtype), index


@pytest.mark.parametrize("train_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_form(monkeypatch, dtype, train_weight):
    from bebop_kernels.linear import triton as linear_triton

    monkeypatch.setattr(linear_triton, "CHUNK_BYTES", 1)
    monkeypatch.setattr(linear_triton, "MIN_CHUNK_ROWS", 4)  # three chunks, the last of one anchor
    draft, target, weight, index = linear_inputs(dtype)
    results = []
    for impl in ("triton", "reference"):
        d, w = draft.clone().requires_grad_(), weight.clone().requires_grad_(train_weight)
        alpha = bk.linear_tv_overlap(d, target, w, index, temperature=0.7, impl=impl)
        alpha.square().sum().backward()
        results.append((alpha.detach(), d.grad, w.grad))
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-4)
    for got, expected in zip(results[0][1:], results[1][1:], strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, **tolerance)
            assert got.dtype == dtype
    assert (results[0][2] is None) is not train_weight


def test_no_rows_no_anchors_and_a_fully_masked_batch():
    draft, target, weight, index = linear_inputs()
    empty = draft[:, :0].clone().requires_grad_()
    alpha = bk.linear_tv_overlap(empty, target, weight, index[:, :0], impl="triton")
    alpha.sum().backward()
    assert alpha.shape == (3, 0) and empty.grad.shape == empty.shape
    rows = torch.zeros(0, 7, requires_grad=True)
    bk.tv_overlap(rows, rows.detach(), impl="triton").sum().backward()
    assert rows.grad.shape == (0, 7)
    assert bk.tv_statistics(rows, rows, impl="triton").alpha.shape == (0,)
    assert_equal(*pair(3, 50), scale=torch.zeros(3))


def test_bfloat16_at_an_overlap_of_98_percent():
    draft, target = pair(3, 4000, torch.bfloat16, noise=0.05)
    alpha, _ = assert_equal(draft, target)
    exact = draft.double().softmax(-1).minimum(target.double().softmax(-1)).sum(-1)
    assert (exact > 0.97).all() and (exact < 0.99).all()
    torch.testing.assert_close(alpha.double(), exact, atol=1e-6, rtol=0)


def test_rows_beyond_element_two_to_the_31():
    """With a row stride of 2^30, the fourth row starts beyond a 32-bit offset. Untouched pages take no memory."""
    vocab, stride = 40, 2**30
    import numpy as np

    held = [torch.from_numpy(np.zeros(3 * stride + vocab, np.float16)) for _ in range(2)]
    draft, target = (x.as_strided((4, vocab), (stride, 1)) for x in held)
    for view, values in zip((draft, target), pair(4, vocab, torch.float16), strict=True):
        view.copy_(values)
    assert 3 * stride > 2**31
    leaf = draft.requires_grad_()
    alpha = bk.tv_overlap(leaf, target, impl="triton")
    (grad,) = torch.autograd.grad(alpha.sum(), leaf)
    inputs = (draft.detach().contiguous(), target.contiguous())
    expected, expected_grad = kernel_cases.alpha_and_grad(*inputs, "reference", scale=torch.ones(4))
    torch.testing.assert_close(alpha.detach(), expected)
    torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-3)


def test_row_offsets_are_computed_in_64_bits_in_every_kernel():
    import ast
    import inspect

    from bebop_kernels._triton import rows as triton_rows

    for name in ("row_sums", "row_overlap", "row_gradient", "row_statistics"):
        tree = ast.parse(inspect.getsource(getattr(triton_rows, name).fn).split("\n", 1)[1])
        assert "row = tl.program_id(0).to(tl.int64)" in ast.unparse(tree), name


def test_the_grid_has_room_for_more_rows_than_16_bits(monkeypatch):
    """Rows are the first axis of the grid, which GPUs limit to 2^31; splits are the second (2^16)."""
    from bebop_kernels._triton import launch
    from bebop_kernels._triton import rows as triton_rows

    class Recorder:
        def __getitem__(self, grid):
            self.grid = grid
            return lambda *args, **kwargs: None

    for name in ("row_sums", "row_overlap", "row_gradient"):
        recorder = Recorder()
        monkeypatch.setattr(triton_rows, name, recorder)
        rows = torch.empty(1, 8).expand(70_000, 8)
        sums = torch.ones(70_000, 4)
        if name == "row_sums":
            monkeypatch.setattr(triton_rows, "merge_sums", Recorder())
            launch.sums(rows, rows, 1.0, None)
        elif name == "row_overlap":
            launch.overlap(rows, rows, None, sums, sums, 1.0, None)
        else:
            launch.gradient(rows, rows, None, sums, sums, sums[:, 0], None, 1.0, rows)
        assert recorder.grid == (70_000, 1)


def test_every_column_belongs_to_exactly_one_split():
    from bebop_kernels._triton.launch import grid_of

    for rows, vocab in itertools.product((1, 2, 3, 7, 100), (1, 5, 1000, 4096, 4097, 49152, 151936, 250880)):
        grid = grid_of(torch.empty(1).expand(rows, vocab))
        assert grid.span % grid.tile.columns == 0
        assert grid.splits * grid.span >= vocab > (grid.splits - 1) * grid.span


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_by_name(value):
    for place in (1, 4500):
        good, bad = torch.zeros(2, 5000), torch.zeros(2, 5000)
        bad[1, place] = value
        for argument, arguments in (("draft_logits", (bad, good)), ("target_logits", (good, bad))):
            for function in (bk.tv_overlap, bk.tv_statistics):
                with pytest.raises(ValueError, match=rf"^{argument}: got NaN or .inf in the logits of 1 rows"):
                    function(*arguments, impl="triton")
    draft, target, weight, index = linear_inputs()
    for argument, tensor in (("draft_hidden", draft), ("target_hidden", target)):
        kept = tensor.clone()
        tensor[..., 0] = value
        with pytest.raises(ValueError, match=rf"^{argument}: got NaN"):
            bk.linear_tv_overlap(draft, target, weight, index, impl="triton")
        tensor.copy_(kept)
    with pytest.raises(
        ValueError, match=r"^target_index: got values 1..11, expected rows of target_hidden in \[0, 5\)"
    ):
        bk.linear_tv_overlap(draft, target[:5], weight, index, impl="triton")


def test_float64_is_refused_with_the_alternatives():
    rows = torch.zeros(1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^impl='triton': takes float32.*got float64\); set impl=.*'reference'"):
        bk.tv_overlap(rows, rows, impl="triton")


@pytest.mark.parametrize("vocab", [5, 127, 129, 1000, 32000, 49152, 151936, 250880])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_against_float64_is_at_most_twice_the_references_own(vocab, dtype):
    rows = oracle.ROWS if vocab <= 1000 else 16  # the interpreter is slow
    verdict = oracle.judge("triton", rows, vocab, dtype)
    assert verdict.holds, verdict
    assert verdict.ties < 0.01 * rows * vocab + 2, verdict


def test_bfloat16_rounds_as_on_devices_and_unknown_interpreters_are_unchanged(monkeypatch):
    import triton
    from bebop_kernels._triton import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    assert not interpreter._truncates(InterpreterBuilder)  # importing rows corrected it

    class Truncates(InterpreterBuilder):
        def cast_impl(self, source, wanted):
            return type(source)((source.data.view("uint32") >> 16).astype("uint16"), wanted)

    monkeypatch.setattr(interpreter.interpreter, "InterpreterBuilder", Truncates)
    monkeypatch.setattr(triton, "__version__", "9.9")
    with pytest.warns(UserWarning, match=r"interpreter of Triton 9\.9 truncates to bfloat16"):
        interpreter.round_bfloat16()
    assert interpreter._truncates(Truncates)
