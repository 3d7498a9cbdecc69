"""A vocabulary split over 2 or 3 ranks, unevenly and with an empty shard, gives the same result as one rank. Also the
operators under torch.compile. The file runs itself as a script for each rank."""

from __future__ import annotations

import os
import subprocess
import sys

import bebop_kernels as bk
import pytest
import torch

pytestmark = pytest.mark.e2e  # each rank is a process that imports torch
SHARDS = {2: [(0, 7), (7, 40)], 3: [(0, 25), (25, 25), (25, 40)]}


def inputs():
    generator = torch.Generator().manual_seed(3)
    draft = torch.randn(2, 6, 5, generator=generator)
    target = torch.randn(8, 5, generator=generator)
    weight = torch.randn(40, 5, generator=generator)
    logits = torch.randn(2, 6, 40, generator=generator) * 2
    logits[:, 1, :25] = -torch.inf  # a row with only -inf in one whole shard
    return draft, target, weight, torch.arange(1, 3)[:, None] + torch.arange(6), logits


def run(impl, group=None, shard=(0, 40), train_weight=False):
    """alpha and hidden gradient of the linear form, weight gradient, alpha and gradient of the logits form."""
    draft, target, weight, index, logits = inputs()
    shard = slice(*shard)
    hidden = draft.requires_grad_()
    weight = weight[shard].clone().requires_grad_(train_weight)
    alpha = bk.linear_tv_overlap(hidden, target, weight, index, temperature=0.9, tp_group=group, impl=impl)
    alpha.square().sum().backward()
    leaf = logits[0, :, shard].clone().requires_grad_()
    flat = bk.tv_overlap(leaf, logits[1, :, shard].clone(), temperature=0.9, tp_group=group, impl=impl)
    flat.square().sum().backward()
    weight_grad = torch.zeros(0) if weight.grad is None else weight.grad
    return alpha.detach(), hidden.grad, weight_grad, flat.detach(), leaf.grad


def one_rank(rank: int, world: int, folder: str, impl: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    group, shard = dist.group.WORLD, SHARDS[world][rank]
    results = [run(impl, group, shard, train_weight) for train_weight in (False, True)]
    # An input that one rank refuses is refused on all, so no rank is left waiting.
    bad = torch.zeros(2, shard[1] - shard[0])
    if rank == 0:
        bad[1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"^draft_logits: got NaN"):
        bk.tv_overlap(bad, torch.zeros_like(bad), tp_group=group, impl=impl)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # a running thread of gloo may abort Python's teardown (torch 2.13)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_and_empty_shards_give_the_whole_result_everywhere(tmp_path, world, impl):
    environment = os.environ | {"TRITON_INTERPRET": "1" if impl == "triton" else "0", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(world), str(tmp_path), impl], env=environment)
        for rank in range(world)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0] * world
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for at, train_weight in enumerate((False, True)):
        parts = [rank[at] for rank in saved]
        alpha, hidden, weight, flat, leaf = run("reference", train_weight=train_weight)
        for got_alpha, got_hidden, _, got_flat, _ in parts:
            for got, expected, first in (
                (got_alpha, alpha, parts[0][0]),
                (got_hidden, hidden, parts[0][1]),
                (got_flat, flat, parts[0][3]),
            ):
                torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)
                assert torch.equal(got, first)
        torch.testing.assert_close(torch.cat([part[2] for part in parts]), weight, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(torch.cat([part[4] for part in parts], 1), leaf, atol=2e-6, rtol=1e-5)


def test_a_shard_without_its_group_is_refused():
    draft, target, weight, index, _ = inputs()
    weight.tensor_model_parallel = True
    with pytest.raises(ValueError, match=r"^weight: got one rank's shard of the vocabulary, expected tp_group"):
        bk.linear_tv_overlap(draft, target, weight, index)


@pytest.mark.parametrize("train_weight", [False, True])
def test_torch_compile_takes_the_operators_whole(train_weight):
    draft, target, weight, index, logits = inputs()
    weight.requires_grad_(train_weight)

    def loss(hidden, leaf):
        alpha = bk.linear_tv_overlap(hidden * 2, target, weight, index, temperature=0.8)
        statistics = bk.tv_statistics(leaf.detach(), logits[1])
        return alpha.prod(0).mean() + bk.tv_overlap(leaf, logits[1]).sum() + statistics.alpha.sum()

    leaves = [draft.requires_grad_(), logits[0].clone().requires_grad_(), *([weight] if train_weight else [])]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, expected = compiled(*leaves[:2]), loss(*leaves[:2])
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(a, b)


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
