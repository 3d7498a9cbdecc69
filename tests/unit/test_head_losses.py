"""The seven losses: values, gradients of the whole chain, clamps, empty batches, and acceptance from sampled text."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bebop.losses import LOSSES, e2e_tv, expected_acceptance, head_loss, hidden_regression


def test_end_to_end_loss_of_the_worked_example():
    alpha = torch.tensor([[0.8], [0.6], [0.5]], dtype=torch.float64)
    loss = e2e_tv(alpha)
    assert loss.item() == pytest.approx(1 - (0.8 + 0.48 + 0.24) / 3)  # .4933
    assert 1 + 3 * (1 - loss.item()) == pytest.approx(2.52)


def test_step_weights_of_equal_alphas():
    alpha = torch.full((3, 1), 0.9, dtype=torch.float64, requires_grad=True)
    e2e_tv(alpha).sum().backward()
    torch.testing.assert_close(-alpha.grad.flatten().float(), torch.tensor([0.903333, 0.57, 0.27]))


@pytest.mark.parametrize("zeros", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_zero_alphas_keep_loss_and_gradient_finite_and_right(zeros):
    values = [0.8, 0.6, 0.5]
    for i in zeros:
        values[i] = 0.0
    alpha = torch.tensor(values, dtype=torch.float64)[:, None].requires_grad_()
    e2e_tv(alpha).sum().backward()
    for i in range(3):
        # w_i = (1/K) sum_{j>=i} prod_{k<=j, k != i} alpha_k
        weight = sum(math.prod(values[k] for k in range(j + 1) if k != i) for j in range(i, 3)) / 3
        assert -alpha.grad[i].item() == pytest.approx(weight, abs=1e-15)


def test_e2e_tv_passes_gradcheck():
    assert torch.autograd.gradcheck(e2e_tv, (torch.rand(4, 6, dtype=torch.float64, requires_grad=True),))


def inputs(dtype=torch.float64, depths=3, anchors=13, width=5, vocab=9, positions=17):
    torch.manual_seed(0)
    draft = torch.randn(depths, anchors, width, dtype=dtype, requires_grad=True)
    target, weight = torch.randn(positions, width, dtype=dtype), torch.randn(vocab, width, dtype=dtype)
    index = torch.arange(1, depths + 1)[:, None] + torch.arange(anchors)
    return draft, target, weight, index, torch.randint(vocab, (depths, anchors))


def written_out(name, draft, target, weight, index, labels, temperature):
    """The losses by softmax and autograd."""
    log_q = (draft @ weight.T / temperature).log_softmax(-1)
    log_p = (target @ weight.T / temperature).log_softmax(-1)[index]
    q, p = log_q.exp(), log_p.exp()
    alpha = q.minimum(p).sum(-1)
    kl = (p * (log_p - log_q)).sum(-1)
    share = (-3 * alpha.detach()).exp()
    if name == "e2e_tv":
        return e2e_tv(alpha).mean(), alpha
    return {
        "hard_ce": -log_q.gather(-1, labels[..., None]).squeeze(-1),
        "kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "tv": 1 - alpha,
        "lk": -alpha.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - alpha),
    }[name].mean(), alpha


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_loss_and_gradient_match_the_written_out_form(monkeypatch, name, temperature):
    from bebop_kernels import rows

    monkeypatch.setattr(rows, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(rows, "MIN_CHUNK_ROWS", 4)
    arguments = inputs()
    draft = arguments[0]
    loss, alpha = head_loss(name, *arguments, temperature=temperature)
    (grad,) = torch.autograd.grad(loss, draft)
    expected, expected_alpha = written_out(name, *arguments, temperature)
    (expected_grad,) = torch.autograd.grad(expected, draft)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)
    torch.testing.assert_close(alpha, expected_alpha.detach().float())
    assert alpha.dtype == torch.float32 and not alpha.requires_grad


def test_finite_differences_of_the_end_to_end_chain():
    draft, *rest = inputs(anchors=4, positions=8)
    assert torch.autograd.gradcheck(lambda d: head_loss("e2e_tv", d, *rest)[0], (draft,), atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_reaches_the_drafts_alone(name):
    draft, target, weight, index, labels = inputs(torch.float32)
    target.requires_grad_()
    weight.requires_grad_()
    head_loss(name, draft, target, weight, index, labels)[0].backward()
    assert target.grad is None and weight.grad is None
    assert draft.grad.abs().sum() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_batch_without_anchors_has_loss_zero_and_gradient_zero(name):
    draft, target, weight, index, labels = inputs(torch.float32)
    empty = draft[:, :0]
    loss, alpha = head_loss(name, empty, target, weight, index[:, :0], labels[:, :0])
    loss.backward()
    assert loss.item() == 0 and alpha.shape == (3, 0)
    assert (draft.grad == 0).all()


def test_tau_max_clamps_the_loss_and_stops_its_gradient():
    arguments = inputs()
    loss, _ = head_loss("tv", *arguments, tau_max=0.01)
    loss.backward()
    assert loss.item() == pytest.approx(0.01)
    assert (arguments[0].grad == 0).all()


@pytest.mark.parametrize("name", ["lk", "kl", "hard_ce"])
def test_tau_max_applies_only_to_losses_up_to_1(name):
    arguments = inputs()
    loss, _ = head_loss(name, *arguments, tau_max=0.01)
    loss.backward()
    assert loss.item() > 0.01 and (arguments[0].grad != 0).any()


@pytest.mark.parametrize("name", LOSSES)
def test_disjoint_draft_and_target_stay_finite(name):
    """Each certain of another token: alpha is 0 in float32."""
    weight = torch.eye(4)
    draft = torch.zeros(2, 3, 4)
    draft[..., 0] = 400
    target = torch.zeros(5, 4)
    target[:, 1] = 400
    draft.requires_grad_()
    index = torch.ones(2, 3, dtype=torch.int64)
    loss, alpha = head_loss(name, draft, target, weight, index, index)
    loss.backward()
    assert (alpha == 0).all()
    assert loss.isfinite() and draft.grad.isfinite().all()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"loss.name: got 'ce', expected one of hard_ce, "):
        head_loss("ce", *inputs())


def test_labels_outside_the_vocabulary_are_refused_by_hard_ce():
    draft, target, weight, index, labels = inputs()
    labels[0, 0] = -100
    with pytest.raises(ValueError, match=r"labels: values -100\.\."):
        head_loss("hard_ce", draft, target, weight, index, labels)


def test_expected_acceptance_equals_enumeration_over_sampled_text():
    """A random 4-token first-order model: the weighted estimate over every text equals sampling's own recursion."""
    torch.manual_seed(1)
    vocab, depth = 4, 3
    p = torch.randn(vocab, vocab, dtype=torch.float64).mul(1.5).softmax(-1)  # p[x] after token x
    q = torch.randn(depth, vocab, vocab, dtype=torch.float64).mul(1.5).softmax(-1)  # depth k drafts by q[k, x]
    # Truth: the drafted chain itself, y_k ~ min(p, q) at each depth.
    truth, reached = [], torch.zeros(vocab, dtype=torch.float64)
    reached[0] = 1
    for k in range(depth):
        reached = (reached[:, None] * p.minimum(q[k])).sum(0)
        truth.append(reached.sum().item())
    # Estimate: every text y of the target, each entering in proportion to its probability.
    alpha_of = torch.stack([p.minimum(q[k]).sum(-1) for k in range(depth)])
    estimate, product = torch.zeros(depth, dtype=torch.float64), torch.zeros(depth, dtype=torch.float64)
    for text in itertools.product(range(vocab), repeat=depth):
        states = (0, *text[:-1])
        alpha = torch.stack([alpha_of[k, s] for k, s in enumerate(states)])[:, None]
        log_p = torch.stack([p[s, y].log() for s, y in zip(states, text, strict=True)])[:, None]
        log_q = torch.stack([q[k, s, y].log() for k, (s, y) in enumerate(zip(states, text, strict=True))])[:, None]
        weight = log_p.sum().exp()
        estimate += weight * expected_acceptance(alpha, log_p, log_q).probability
        product += weight * alpha.cumprod(0).squeeze(1)
    torch.testing.assert_close(estimate, torch.tensor(truth, dtype=torch.float64))
    assert (product - estimate).abs().max() > 1e-3, "the plain product of alphas is biased"


def test_expected_acceptance_states_its_error():
    torch.manual_seed(2)
    alpha = torch.rand(3, 4000)
    zeros = torch.zeros(3, 4000)
    result = expected_acceptance(alpha, zeros, zeros)
    assert result.probability[0].item() == pytest.approx(0.5, abs=4 * result.standard_error[0].item())
    assert result.standard_error[0].item() == pytest.approx(1 / math.sqrt(12 * 4000), rel=0.05)
    assert result.acceptance_length.item() == pytest.approx(1 + result.probability.sum().item())
    assert expected_acceptance(alpha[:, :0], zeros[:, :0], zeros[:, :0]).probability.isnan().all()


def test_expected_acceptance_refuses_other_shapes_and_nan():
    good = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^draft_logprob: got shape \[2, 4\]"):
        expected_acceptance(good, good, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"^target_logprob: got NaN"):
        expected_acceptance(good, good / 0, good)
    with pytest.raises(ValueError, match=r"^alpha: got shape \[3\]"):
        e2e_tv(torch.zeros(3))


@pytest.mark.parametrize("name", ["hard_ce", "kl", "reverse_kl", "lk_hybrid"])
def test_loss_without_a_kernel_refuses_an_impl(name):
    draft, target, weight = torch.randn(1, 2, 3), torch.randn(3, 3), torch.randn(5, 3)
    index = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=rf"^impl: got 'cpu', .* the loss {name} has no kernel"):
        head_loss(name, draft, target, weight, index, index, impl="cpu")


def test_hidden_regression_is_a_share_of_the_targets_size():
    target = torch.randn(6, 4, dtype=torch.float64)
    index = torch.tensor([[0, 1], [2, 5]])
    assert hidden_regression(target[index], target, index) == 0
    assert hidden_regression(torch.zeros(2, 2, 4), target, index) == pytest.approx(1.0)
    draft = (target[index] * 1.5).requires_grad_()
    loss = hidden_regression(draft, target, index)
    loss.backward()
    assert loss.item() == pytest.approx(0.25)
    assert torch.equal(draft.grad.sign(), target[index].sign())
    empty = torch.zeros(2, 0, 4, requires_grad=True)
    hidden_regression(empty, target, index[:, :0]).backward()
    assert empty.grad is not None
    with pytest.raises(ValueError, match="target_index"):
        hidden_regression(draft, target, index[:1])
