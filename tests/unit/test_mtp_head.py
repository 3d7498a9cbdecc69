"""The head as a module: the engine's recursion at every anchor, and gradients that stay inside the head."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from bebop.data import anchor_labels, anchors, pack, target_index
from bebop.losses import head_loss
from bebop.mtp import MtpHead, checksum, draft_hidden, head_state
from bebop.mtp import chain_attention as attention
from bebop.mtp.chain_attention import (
    Documents,
    chain_attention,
    dense_causal,
    dense_causal_backward,
    naive_chain_attention,
)
from bebop.mtp.families import MIMO

WIDTH, VOCAB, LENGTHS = 24, 19, (1, 9, 4, 30, 2, 17, 5)


@pytest.fixture(params=[4, 2, 1], ids=lambda n: f"{n} key heads of 4")
def head(request):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=WIDTH,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=request.param,
        num_hidden_layers=1,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    head = MtpHead(MIMO, config, 1 + 0.3 * torch.randn(WIDTH))
    for parent in list(head.modules()):  # transformers' norm computes in float32 whatever comes
        for name, module in list(parent.named_children()):
            if isinstance(module, Qwen2RMSNorm):
                setattr(parent, name, torch.nn.RMSNorm(module.weight.shape, module.variance_epsilon))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0, 0.3)
    return head.double()


@pytest.fixture
def text():
    """(hidden, embed_weight, batch) of seven packed documents."""
    torch.manual_seed(1)
    (batch,) = pack([(torch.randint(VOCAB, (n,)).tolist(), [1] * n) for n in LENGTHS], 100)
    return torch.randn(len(batch.input_ids), WIDTH).double(), torch.randn(VOCAB, WIDTH).double(), batch


def drafts(head, text, depth, **kwargs):
    hidden, embed_weight, batch = text
    packed = (batch.input_ids, batch.cu_seqlens, batch.position_ids)
    return draft_hidden(head, hidden, embed_weight, *packed, depth, **kwargs)


def engine_loop(head, hidden, embed_weight, ids, anchor, depth):
    """One anchor's drafts as an engine makes them: fill a cache up to the anchor, then one token at a time.

    The layer is transformers' own, so nothing of bebop's attention is in here.
    """
    layer = Qwen2DecoderLayer(head.config, 0).double()
    layer.load_state_dict(head.layer.state_dict())
    rotary = Qwen2RotaryEmbedding(head.config)

    def project(state, embedding):
        return head.proj(torch.cat([head.hidden_norm(state), head.token_norm(embedding)], -1))

    embedding = embed_weight[ids[1 : anchor + 2]].clone()
    embedding[0] = 0  # the engine masks the embedding at position 0
    inputs = project(hidden[: anchor + 1] / head.backbone_norm, embedding)
    outputs = []
    for k in range(1, depth + 1):
        length = len(inputs)
        cos, sin = rotary(inputs, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        out = layer(inputs[None], attention_mask=mask, position_embeddings=(cos.double(), sin.double()))
        outputs.append(head.norm(out[0, -1]))
        if k < depth:
            inputs = torch.cat([inputs, project(outputs[-1], embed_weight[ids[anchor + k + 1]])[None]])
    return torch.stack(outputs)


def test_every_anchor_is_drafted_as_by_an_engine_loop(head, text):
    hidden, embed_weight, batch = text
    got = drafts(head, text, 3)
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        for anchor in range(end - start - 3):
            expected = engine_loop(head, hidden[start:end], embed_weight, batch.input_ids[start:end], anchor, 3)
            torch.testing.assert_close(got[:, start + anchor], expected, atol=1e-5, rtol=1e-5)


def test_documents_in_a_pack_do_not_see_each_other(head, text):
    hidden, embed_weight, batch = text
    together = drafts(head, text, 2)
    for a, b in pairwise(batch.cu_seqlens.tolist()):
        (alone,) = pack([(batch.input_ids[a:b].tolist(), [1] * (b - a))], 100)
        for k in range(2):
            rows = slice(a, max(a, b - k - 1))  # where token t+k exists
            got = drafts(head, (hidden[a:b], embed_weight, alone), 2)[k, : rows.stop - a]
            torch.testing.assert_close(together[k, rows], got)


def test_shallow_drafts_do_not_depend_on_how_deep_is_drafted(head, text):
    torch.testing.assert_close(drafts(head, text, 1), drafts(head, text, 4)[:1])
    assert drafts(head, text, 5).isfinite().all()


@pytest.mark.parametrize("columns", [0, 1, 4])
def test_merged_attention_and_its_gradients_equal_one_dense_softmax(columns):
    torch.manual_seed(2)
    total, cu_seqlens = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0)
    flat = [torch.randn(total, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    chain = [torch.randn(total, columns, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    out = chain_attention(*flat, *chain, Documents.of(cu_seqlens))
    expected = naive_chain_attention(*flat, *chain, cu_seqlens)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    got = torch.autograd.grad(out, [*flat, *chain], direction)
    for gradient, reference in zip(got, torch.autograd.grad(expected, [*flat, *chain], direction), strict=True):
        torch.testing.assert_close(gradient, reference)


def test_dense_and_flash_causal_attention_agree_inside_a_longer_softmax():
    torch.manual_seed(3)
    q, k, v, grad = (torch.randn(2, 3, 9, 5, dtype=torch.float64) for _ in range(4))
    out, lse = dense_causal(q, k, v)
    torch.testing.assert_close((out, lse), attention._causal(q, k, v))
    longer = (grad, q, k, v, out + 0.1, lse + torch.rand_like(lse))
    torch.testing.assert_close(dense_causal_backward(*longer), attention._causal_backward(*longer))


def test_drafting_at_anchors_alone_gives_the_same_states_and_gradients(head, text):
    _, _, batch = text
    at = anchors(batch, 2)[torch.randperm(len(anchors(batch, 2)))]
    direction = torch.randn(2, len(at), WIDTH, dtype=torch.float64)
    everywhere = drafts(head, text, 2)[:, at]
    expected = torch.autograd.grad(everywhere, list(head.parameters()), direction)
    some = drafts(head, text, 2, anchors=at)
    torch.testing.assert_close(some, everywhere)
    torch.testing.assert_close(torch.autograd.grad(some, list(head.parameters()), direction), expected)
    assert drafts(head, text, 2, anchors=at[:0]).shape == (2, 0, WIDTH)


def test_gradient_of_the_end_to_end_loss_matches_finite_differences(head, text):
    """Through the losses, the recursion and the merged attention, on one direction in parameter space."""
    hidden, _, batch = text
    at = anchors(batch, 3)
    index, labels = target_index(at, 3), anchor_labels(batch, at, 3)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64) / 3

    def loss():
        return head_loss("e2e_tv", drafts(head, text, 3, anchors=at), hidden, weight, index, labels)[0]

    loss().backward()
    parameters = list(head.parameters())
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, direction, strict=True)).item()
    step, values = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(parameters, direction, strict=True):
                p += sign * step * d
            values.append(loss().item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_training_leaves_all_tensors_but_heads_byte_identical(head, text, tied):
    hidden, embed_weight, batch = text
    hidden.requires_grad_()
    trunk = {"embed": embed_weight.requires_grad_()}
    trunk["lm_head"] = embed_weight if tied else torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    before, heads_before = checksum(trunk), checksum(head_state(head))
    optimizer = torch.optim.SGD([*head.parameters(), *set(trunk.values())], lr=0.1)
    at = anchors(batch, 3)
    for _ in range(10):
        loss, _ = head_loss(
            "e2e_tv",
            drafts(head, text, 3, anchors=at),
            hidden,
            trunk["lm_head"],
            target_index(at, 3),
            anchor_labels(batch, at, 3),
        )
        optimizer.zero_grad()
        loss.backward()
        assert hidden.grad is None
        assert all(tensor.grad is None for tensor in trunk.values())
        assert all(
            p.grad is not None and p.grad.abs().sum() > 0 for n, p in head.named_parameters() if "k_proj.bias" not in n
        )
        optimizer.step()
    assert checksum(trunk) == before
    assert checksum(head_state(head)) != heads_before


def test_bfloat16_head_keeps_float32_rotary_frequencies(head):
    head.bfloat16()
    assert head._rotary[0].inv_freq.dtype == torch.float32


def test_bad_arguments_are_named(head, text):
    hidden, embed_weight, batch = text
    ids, cu, positions = batch.input_ids, batch.cu_seqlens, batch.position_ids
    for bad in (torch.tensor([0, 0]), torch.tensor([-1]), torch.tensor([len(ids)]), torch.tensor([0.0])):
        with pytest.raises(ValueError, match=r"^anchors: .*expected"):
            drafts(head, text, 1, anchors=bad)
    for argument, arguments in (
        ("hidden", (hidden[1:], embed_weight, ids, cu, positions, 3)),
        ("embed_weight", (hidden, embed_weight[:, 1:], ids, cu, positions, 3)),
        ("input_ids", (hidden, embed_weight, ids + 5, cu, positions, 3)),
        ("input_ids", (hidden, embed_weight, ids - 5, cu, positions, 3)),
        ("cu_seqlens", (hidden, embed_weight, ids, cu[:-1], positions, 3)),
        ("position_ids", (hidden, embed_weight, ids, cu, positions[1:], 3)),
        ("depth", (hidden, embed_weight, ids, cu, positions, 0)),
        ("depth", (hidden, embed_weight, ids, cu, positions, 1.5)),
    ):
        with pytest.raises(ValueError, match=rf"^{argument}.*expected"):
            draft_hidden(head, *arguments)


def test_a_final_norm_that_erased_a_channel_is_refused(head):
    norm = torch.ones(WIDTH)
    norm[3] = 0
    with pytest.raises(ValueError, match=r"backbone_norm: .* with 1 zeros"):
        MtpHead(MIMO, head.config, norm)
