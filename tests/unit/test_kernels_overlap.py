"""tv_overlap, linear_tv_overlap and tv_statistics against the formulas, at inputs that break published kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import bebop_kernels as bk
import numpy as np
import pytest
import torch
from bebop_kernels import rows
from bebop_kernels.linear import naive as naive_linear
from bebop_kernels.overlap import naive
from bebop_kernels.statistics import naive as naive_statistics

P, Q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few rows, so that small inputs span several chunks."""
    monkeypatch.setattr(rows, "CHUNK_ELEMENTS", 64)
    monkeypatch.setattr(rows, "MIN_CHUNK_ROWS", 3)


def alpha_and_grad(draft, target, **kwargs):
    draft = draft.clone().requires_grad_()
    alpha = bk.tv_overlap(draft, target, **kwargs)
    alpha.sum().backward()
    return alpha.detach(), draft.grad


def test_check_vector():
    alpha, grad = alpha_and_grad(Q.log(), P.log())
    torch.testing.assert_close(alpha, torch.tensor([0.6]))
    torch.testing.assert_close(-grad, torch.tensor([[-0.12, -0.12, 0.24]]))
    torch.testing.assert_close(naive.tv_gradient(Q.log(), P.log()), torch.tensor([[-0.12, -0.12, 0.24]]))
    assert -alpha.log().item() == pytest.approx(0.5108, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("shape", [(1, 2), (41, 401), (7, 1271)])
def test_matches_the_formula_and_its_autograd(small_chunks, shape, temperature):
    torch.manual_seed(0)
    draft, target = torch.randn(shape, dtype=torch.float64) * 2, torch.randn(shape, dtype=torch.float64) * 2
    alpha, grad = alpha_and_grad(draft, target, temperature=temperature)
    reference = draft.clone().requires_grad_()
    expected = naive.tv_overlap(reference, target, temperature=temperature)
    expected.sum().backward()
    torch.testing.assert_close(alpha, expected.detach())
    torch.testing.assert_close(grad, reference.grad)


def test_gradient_passes_gradcheck_in_float64(small_chunks):
    torch.manual_seed(1)
    draft = torch.randn(8, 9, dtype=torch.float64, requires_grad=True)
    target = torch.randn(8, 9, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: bk.tv_overlap(z, target, temperature=0.8), (draft,))


def test_equal_rows_have_alpha_one_and_gradient_exactly_zero():
    torch.manual_seed(2)
    logits = torch.randn(50, 333) * 4
    alpha, grad = alpha_and_grad(logits, logits.clone())
    torch.testing.assert_close(alpha, torch.ones(50))
    assert (grad == 0).all()


def test_target_gets_no_gradient():
    target = torch.randn(2, 5, requires_grad=True)
    draft = torch.randn(2, 5, requires_grad=True)
    bk.tv_overlap(draft, target).sum().backward()
    assert target.grad is None and draft.grad is not None


class TestMinusInfinity:
    """-inf in both rows, in one row, in a whole first vocabulary tile: the result is that of the remaining tokens."""

    def check(self, draft, target):
        alpha, grad = alpha_and_grad(draft, target)
        q, p = draft.double().softmax(-1), target.double().softmax(-1)
        torch.testing.assert_close(alpha.double(), q.minimum(p).sum(-1), atol=1e-6, rtol=0)
        assert grad.isfinite().all()
        assert (grad[draft == -torch.inf] == 0).all()
        return alpha

    def test_in_both_rows(self):
        torch.manual_seed(0)
        draft, target = torch.randn(3, 300), torch.randn(3, 300)
        draft[:, 40:80] = target[:, 40:80] = -torch.inf
        self.check(draft, target)

    def test_in_one_row(self):
        draft = P.log().expand(2, 3).clone()
        target = draft.clone()
        target[0, 2] = -torch.inf
        draft[1, 2] = -torch.inf
        # p = [0.625, 0.375, 0] against q = [0.5, 0.3, 0.2], and the reverse
        torch.testing.assert_close(self.check(draft, target), torch.tensor([0.8, 0.8]))

    def test_over_a_whole_first_vocabulary_tile(self):
        torch.manual_seed(1)
        draft = torch.randn(2, 8192)
        target = draft + 0.15 * torch.randn(2, 8192)
        draft[:, :4096] = target[:, :4096] = -torch.inf
        assert (self.check(draft, target) > 0.93).all()

    def test_a_row_of_minus_infinity_has_zero_overlap_and_gradient(self):
        draft, target = torch.zeros(2, 4), torch.zeros(2, 4)
        draft[0] = target[1] = -torch.inf
        alpha, grad = alpha_and_grad(draft, target)
        assert alpha.tolist() == [0.0, 0.0]
        assert (grad == 0).all()

    def test_in_statistics(self):
        draft, target = Q.log(), P.log()
        draft[0, 0] = target[0, 1] = -torch.inf
        stats = bk.tv_statistics(draft, target)
        assert stats.alpha.item() == pytest.approx(2 / 7)
        assert stats.target_entropy.isfinite() and stats.draft_entropy.isfinite()
        assert stats.kl.item() == float("inf")  # q is 0 where p is not


def linear_inputs(dtype=torch.float64, depths=3, anchors=20, width=6, vocab=11, positions=24):
    torch.manual_seed(3)
    draft = torch.randn(depths, anchors, width, dtype=dtype)
    target = torch.randn(positions, width, dtype=dtype)
    weight = torch.randn(vocab, width, dtype=dtype)
    index = torch.arange(1, depths + 1)[:, None] + torch.arange(anchors)
    return draft, target, weight, index


@pytest.mark.parametrize("train_weight", [False, True])
def test_linear_form_matches_the_formula_and_its_autograd(small_chunks, train_weight):
    draft, target, weight, index = linear_inputs()
    grads = []
    for function in (bk.linear_tv_overlap, naive_linear.linear_tv_overlap):
        d, w = draft.clone().requires_grad_(), weight.clone().requires_grad_(train_weight)
        t = target.clone().requires_grad_(function is bk.linear_tv_overlap)
        alpha = function(d, t, w, index, temperature=0.7)
        (alpha * torch.arange(1.0, 1 + alpha.numel()).view_as(alpha)).sum().backward()
        assert t.grad is None
        grads.append((alpha.detach(), d.grad, w.grad))
    for got, expected in zip(*grads, strict=True):
        if expected is not None or train_weight:
            torch.testing.assert_close(got, expected)
    assert (grads[0][2] is None) is not train_weight


@pytest.mark.parametrize("train_weight", [False, True])
def test_linear_form_passes_gradcheck_for_hidden_states(small_chunks, train_weight):
    draft, target, weight, index = linear_inputs(anchors=5, positions=9)
    weight.requires_grad_(train_weight)
    assert torch.autograd.gradcheck(lambda d: bk.linear_tv_overlap(d, target, weight, index), (draft.requires_grad_(),))


def test_no_vocabulary_wide_tensor_is_kept_for_backward():
    draft, target, weight, index = linear_inputs(torch.float32, anchors=64, positions=70, vocab=1000)
    draft.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        bk.linear_tv_overlap(draft, target, weight, index)
    assert saved == [draft.shape]


def test_no_gradient_is_prepared_under_no_grad():
    draft, target, weight, index = linear_inputs(torch.float32)
    with torch.no_grad():
        assert not bk.linear_tv_overlap(draft.requires_grad_(), target, weight, index).requires_grad


def test_statistics_match_the_formula(small_chunks):
    torch.manual_seed(4)
    draft, target = torch.randn(23, 57) * 2, torch.randn(23, 57) * 2
    tokens = torch.randint(57, (23,))
    stats = bk.tv_statistics(draft, target, tokens=tokens, temperature=0.6)
    for name, expected in naive_statistics.tv_statistics(draft, target, temperature=0.6).items():
        torch.testing.assert_close(getattr(stats, name), expected, msg=name)
    expected = (target / 0.6).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(stats.target_logprob, expected)
    expected = (draft / 0.6).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(stats.draft_logprob, expected)
    assert bk.tv_statistics(draft, target).target_logprob is None


def test_entropy_is_at_the_sampling_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert bk.tv_statistics(logits, logits).target_entropy.item() == pytest.approx(0.8324, abs=1e-4)
    assert bk.tv_statistics(logits, logits, temperature=0.5).target_entropy.item() == pytest.approx(0.4411, abs=1e-4)


def test_more_rows_than_16_bits_and_more_than_one_chunk():
    torch.manual_seed(5)
    draft, target = torch.randn(70_000, 5), torch.randn(70_000, 5)
    alpha, grad = alpha_and_grad(draft, target)
    torch.testing.assert_close(alpha, naive.tv_overlap(draft, target))
    torch.testing.assert_close(grad[-3:], alpha_and_grad(draft[-3:], target[-3:])[1])


def test_offsets_beyond_32_bits():
    """Rows after element 2^31 of a logits tensor, 8,560 rows of 250,880 tokens. Untouched pages take no memory."""
    rng = np.random.default_rng(0)
    held = [np.zeros((8_560, 250_880), np.float16) for _ in range(2)]
    for array in held:
        array[-2:] = rng.standard_normal((2, 250_880))
    draft, target = (torch.from_numpy(array) for array in held)
    assert draft.numel() > 2**31
    alpha, grad = alpha_and_grad(draft[-3:], target[-3:])
    torch.testing.assert_close(alpha, naive.tv_overlap(draft[-3:].float(), target[-3:].float()), atol=1e-5, rtol=0)
    assert (grad[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    torch.manual_seed(6)
    draft, target = torch.randn(5, 100, dtype=dtype), torch.randn(5, 100, dtype=dtype)
    alpha, grad = alpha_and_grad(draft, target)
    assert alpha.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(alpha, naive.tv_overlap(draft.float(), target.float()))


class TestRefusals:
    """Bad input is a ValueError that names the argument."""

    def test_shapes_and_types(self):
        good = torch.zeros(2, 3)
        for argument, draft, target in (
            ("draft_logits", torch.zeros(3), good),
            ("draft_logits", torch.zeros(2, 3, dtype=torch.long), good),
            ("target_logits", good, torch.zeros(2, 4)),
            ("target_logits", good, torch.zeros(3, 3)),
        ):
            for function in (bk.tv_overlap, bk.tv_statistics):
                with pytest.raises(ValueError, match=rf"^{argument}: .*expected"):
                    function(draft, target)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_nan_and_infinity(self, value):
        good, bad = torch.zeros(2, 3), torch.zeros(2, 3)
        bad[1, 1] = value
        for argument, pair in (("draft_logits", (bad, good)), ("target_logits", (good, bad))):
            for function in (bk.tv_overlap, bk.tv_statistics):
                with pytest.raises(ValueError, match=rf"^{argument}: got NaN or .inf in the logits of 1 rows"):
                    function(*pair)
        draft, target, weight, index = linear_inputs()
        for argument, tensor in (("draft_hidden", draft), ("target_hidden", target)):
            kept = tensor[..., 0].clone()
            tensor[..., 0] = value
            with pytest.raises(ValueError, match=rf"^{argument}: got NaN"):
                bk.linear_tv_overlap(draft, target, weight, index)
            tensor[..., 0] = kept

    @pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
    def test_temperature(self, temperature):
        with pytest.raises(ValueError, match=r"^temperature: got "):
            bk.tv_overlap(torch.zeros(1, 2), torch.zeros(1, 2), temperature=temperature)

    def test_implementation(self):
        with pytest.raises(ValueError, match=r"^impl: got 'fast', expected one of auto, triton, cpu, reference"):
            bk.tv_overlap(torch.zeros(1, 2), torch.zeros(1, 2), impl="fast")

    def test_tokens_outside_the_vocabulary(self):
        for tokens in (torch.tensor([3]), torch.tensor([-1]), torch.tensor([0.0]), torch.tensor([0, 1])):
            with pytest.raises(ValueError, match=r"^tokens: "):
                bk.tv_statistics(torch.zeros(1, 3), torch.zeros(1, 3), tokens=tokens)

    def test_linear_arguments(self):
        draft, target, weight, index = linear_inputs()
        for argument, arguments in (
            ("draft_hidden", (draft[0], target, weight, index)),
            ("target_hidden", (draft, target[:, :3], weight, index)),
            ("weight", (draft, target, weight.float(), index)),
            ("target_index", (draft, target, weight, index[:2])),
            ("target_index", (draft, target, weight, index.int())),
            ("target_index", (draft, target, weight, index + 20)),
            ("target_index", (draft, target, weight, index - 5)),
        ):
            with pytest.raises(ValueError, match=rf"^{argument}: .*expected"):
                bk.linear_tv_overlap(*arguments)


def one_rank(rank: int, folder: str) -> None:
    """One of two tensor-parallel ranks. The test runs this file as a script for each."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    draft, target, weight, index = linear_inputs(vocab=12)
    shard = slice(rank * 6, rank * 6 + 6)
    hidden = draft.clone().requires_grad_()
    alpha = bk.linear_tv_overlap(hidden, target, weight[shard], index, temperature=0.9, tp_group=dist.group.WORLD)
    alpha.sum().backward()
    logits = (draft[0] @ weight.T)[:, shard].clone().requires_grad_()
    other = (target[index[0]] @ weight.T)[:, shard]
    flat = bk.tv_overlap(logits, other, temperature=0.9, tp_group=dist.group.WORLD)
    flat.sum().backward()
    torch.save((alpha.detach(), hidden.grad, flat.detach(), logits.grad), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # a running thread of gloo may abort Python's teardown (torch 2.13)


def test_vocabulary_shards_of_two_ranks_give_the_whole_result(tmp_path):
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    draft, target, weight, index = linear_inputs(vocab=12)
    hidden = draft.clone().requires_grad_()
    alpha = bk.linear_tv_overlap(hidden, target, weight, index, temperature=0.9)
    alpha.sum().backward()
    grads = []
    for rank in range(2):
        got_alpha, got_grad, flat, flat_grad = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(got_alpha, alpha.detach())
        torch.testing.assert_close(got_grad, hidden.grad)
        torch.testing.assert_close(flat, alpha[0].detach())
        grads.append(flat_grad)
    torch.testing.assert_close(torch.cat(grads, 1) @ weight, hidden.grad[0])


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), sys.argv[2])
