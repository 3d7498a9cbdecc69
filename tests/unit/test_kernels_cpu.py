"""The compiled CPU kernels against the reference and a float64 oracle, at inputs that break published kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import bebop_kernels as bk
import kernel_cases
import oracle
import pytest
import torch
from bebop_kernels import dispatch
from bebop_kernels._cpu import threads
from bebop_kernels.linear import cpu as linear_cpu
from bebop_kernels.overlap import naive
from kernel_cases import pair

CPU = torch.device("cpu")


alpha_and_grad = partial(kernel_cases.alpha_and_grad, impl="cpu")
assert_equal = partial(kernel_cases.assert_like_reference, "cpu", grad_atol=2e-6)
check_statistics = partial(kernel_cases.assert_statistics_like_reference, "cpu")


@pytest.mark.parametrize("vocab", [5, 127, 129, 1000, 32000, 49152, 151936, 250880])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_against_float64_is_at_most_twice_the_references_own(vocab, dtype):
    rows = oracle.ROWS if vocab <= 1000 else 16 if vocab < 100_000 else 5
    verdict = oracle.judge("cpu", rows, vocab, dtype)
    assert verdict.holds, verdict
    assert verdict.ties < 0.01 * rows * vocab + 2, verdict


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.7])
def test_error_holds_at_every_temperature(temperature):
    verdict = oracle.judge("cpu", oracle.ROWS, 1271, torch.float32, temperature=temperature)
    assert verdict.holds, verdict


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_draft_and_target_of_different_types(dtypes):
    draft, target = pair(5, 401)
    assert_equal(draft.to(dtypes[0]), target.to(dtypes[1]), 0.7)


def test_rows_that_are_not_contiguous():
    wide, other = pair(9, 2 * 300)
    assert_equal(wide[:, ::2], other[:, 300:])
    assert_equal(wide.T[:300].T[1:8], other[1:8, :300], 0.6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_rows_have_a_gradient_of_exactly_zero(dtype):
    logits, _ = pair(50, 3331, dtype)
    alpha, grad = alpha_and_grad(logits * 2, logits.clone() * 2, temperature=0.9)
    torch.testing.assert_close(alpha, torch.ones(50))
    assert (grad == 0).all()


def test_a_common_shift_of_a_thousand_changes_nothing():
    draft, target = pair(20, 5000)
    draft, target = (draft * 8).round() / 8, (target * 8).round() / 8  # the shifted numbers are exact
    alpha, grad = alpha_and_grad(draft, target)
    shifted_alpha, shifted_grad = alpha_and_grad(draft + 1000, target + 1000)
    assert torch.equal(alpha, shifted_alpha) and torch.equal(grad, shifted_grad)


class TestMinusInfinity(kernel_cases.MinusInfinity):
    impl, grad_atol, tolerance = "cpu", 2e-6, 5e-6


def test_differences_beyond_the_range_of_the_exponential():
    draft = torch.tensor([[0.0, -86.0, -88.0, -104.0, -1e4, -3e38, -torch.inf]])
    assert_equal(draft, draft.flip(1), 0.5)
    assert_equal(draft * 0.9, draft)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab", [(23, 57), (3, 6001)])
def test_statistics(rows, vocab, dtype):
    check_statistics(*pair(rows, vocab, dtype), 0.6)


def test_argmax_is_the_first_maximum():
    draft, target = pair(3, 9000)
    draft[:, [4100, 4700, 8999]] = draft.amax() + 1
    chosen = bk.tv_statistics(draft, target, impl="cpu").target_prob_of_draft_argmax
    torch.testing.assert_close(chosen, target.softmax(-1)[:, 4100])


@pytest.mark.parametrize("train_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_form(monkeypatch, dtype, train_weight):
    monkeypatch.setattr(linear_cpu, "CHUNK_ELEMENTS", 64)
    monkeypatch.setattr(linear_cpu, "MIN_CHUNK_ROWS", 12)  # 4 anchors per chunk
    monkeypatch.setattr(threads, "BLOCK_ELEMENTS", 1000)  # 2 rows per block
    monkeypatch.setattr(threads, "FEW_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(3)
    depths, anchors, width, vocab = 3, 9, 16, 371
    target = torch.randn(anchors + depths, width, generator=generator)
    index = torch.arange(1, depths + 1)[:, None] + torch.arange(anchors)
    draft = target[index] + 0.3 * torch.randn(depths, anchors, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    results = []
    for impl in ("cpu", "reference"):
        d, w = draft.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(train_weight)
        alpha = bk.linear_tv_overlap(d, target.to(dtype), w, index, temperature=0.7, impl=impl)
        (alpha * torch.arange(1.0, 1 + alpha.numel()).view_as(alpha)).sum().backward()
        results.append((alpha.detach(), d.grad.float(), w.grad.float() if train_weight else torch.zeros(1)))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-6, rtol=1e-5)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype]
    for got, expected in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(got, expected, atol=rtol * float(expected.abs().max()), rtol=rtol)


def test_no_rows_no_anchors_and_a_fully_masked_batch():
    alpha, grad = alpha_and_grad(torch.zeros(0, 7), torch.zeros(0, 7))
    assert alpha.shape == (0,) and grad.shape == (0, 7)
    assert all(f.shape == (0,) for f in bk.tv_statistics(torch.zeros(0, 7), torch.zeros(0, 7), impl="cpu")[:5])
    hidden = torch.zeros(3, 0, 4, requires_grad=True)
    index = torch.zeros(3, 0, dtype=torch.long)
    alpha = bk.linear_tv_overlap(hidden, torch.zeros(2, 4), torch.zeros(11, 4), index, impl="cpu")
    alpha.sum().backward()
    assert alpha.shape == (3, 0) and hidden.grad.shape == hidden.shape
    masked = torch.full((4, 9), -torch.inf)
    alpha, grad = alpha_and_grad(masked, masked.clone())
    assert (alpha == 0).all() and (grad == 0).all()


def test_bfloat16_at_an_overlap_of_98_percent():
    draft, target = pair(8, 30_000, torch.bfloat16, noise=0.06)
    alpha, _ = assert_equal(draft, target)
    assert (alpha > 0.97).all()


def test_more_rows_than_a_16_bit_grid():
    draft, target = pair(70_000, 5)
    alpha, grad = alpha_and_grad(draft, target)
    torch.testing.assert_close(alpha, naive.tv_overlap(draft, target), atol=1e-6, rtol=1e-5)
    own = alpha_and_grad(draft[-3:], target[-3:])[1] / torch.arange(1.0, 4)[:, None]
    torch.testing.assert_close(grad[-3:] / torch.arange(69_998.0, 70_001)[:, None], own)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_are_refused_by_name(value, dtype):
    good, bad = torch.zeros(2, 3000, dtype=dtype), torch.zeros(2, 3000, dtype=dtype)
    bad[1, 2500] = value
    for argument, logits in (("draft_logits", (bad, good)), ("target_logits", (good, bad))):
        for function in (bk.tv_overlap, bk.tv_statistics):
            with pytest.raises(ValueError, match=rf"^{argument}: got NaN or .inf in the logits of 1 rows"):
                function(*logits, impl="cpu")
    hidden = torch.zeros(2, 3, 4, dtype=dtype)
    weight, index = torch.ones(11, 4, dtype=dtype), torch.zeros(2, 3, dtype=torch.long)
    for argument in ("draft_hidden", "target_hidden"):
        tensors = {"draft_hidden": hidden.clone(), "target_hidden": hidden[0].clone()}
        tensors[argument].view(-1, 4)[0, 0] = value
        with pytest.raises(ValueError, match=rf"^{argument}: got NaN"):
            bk.linear_tv_overlap(*tensors.values(), weight, index, impl="cpu")


def test_float64_and_shards_are_refused_and_auto_uses_the_reference():
    logits = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"impl='cpu': .*float64.*impl='reference'"):
        bk.tv_overlap(logits, logits, impl="cpu")
    for kernel in ("overlap", "linear", "statistics"):
        assert dispatch.choose("auto", kernel, CPU, (torch.float64,)) == "reference"
        assert dispatch.choose("auto", kernel, CPU, (torch.bfloat16,)) == "cpu"
        assert dispatch.choose("auto", kernel, CPU, (torch.bfloat16,), sharded=True) == "reference"
        with pytest.raises(ValueError, match=r"impl='cpu': takes the whole vocabulary.*impl='reference'"):
            dispatch.choose("cpu", kernel, CPU, (torch.bfloat16,), sharded=True)


def test_without_numba_cpu_is_refused_and_auto_uses_the_reference():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch, bebop_kernels as bk\n"
        "z = torch.zeros(2, 3)\n"
        "assert (bk.tv_overlap(z, z) == 1).all()\n"
        "bk.tv_overlap(z, z, impl='cpu')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: impl='cpu': needs numba" in done.stderr and "pip install numba" in done.stderr


def test_results_are_the_same_bits_on_any_number_of_threads():
    draft, target = pair(37, 9001)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append((*alpha_and_grad(draft, target), *bk.tv_statistics(draft, target, impl="cpu")[:5]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_blocks_cover_every_row_once_on_the_threads_torch_has(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for rows in (0, 1, 2, 7, 100):
        seen.clear()
        threads.in_blocks(rows, 1 << 16, lambda block: seen.extend(range(block.start, block.stop)))
        assert sorted(seen) == list(range(rows))


def test_an_error_in_a_worker_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def work(block):
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        threads.in_blocks(8, 1 << 19, work)


def test_calls_from_many_threads_and_from_a_forked_child():
    draft, target = pair(16, 9001)
    expected = bk.tv_overlap(draft, target, impl="cpu")
    with ThreadPoolExecutor(4) as pool:
        for alpha in pool.map(lambda _: bk.tv_overlap(draft, target, impl="cpu"), range(16)):
            assert torch.equal(alpha, expected)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(bk.tv_overlap(draft, target, impl="cpu"), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_torch_compile_takes_the_whole_graph():
    draft, target = pair(4, 100)
    compiled = torch.compile(lambda d, t: bk.tv_overlap(d * 2, t * 2, impl="cpu"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(draft, target), bk.tv_overlap(draft * 2, target * 2, impl="cpu"))
