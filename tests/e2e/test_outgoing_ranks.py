"""Two ranks of verl's FSDP2 send the whole checkpoint each, under its own names. The file runs itself for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bebop.engines.weights import Layout
from bebop.mtp.checkpoint import Tensors
from bebop.policies import random_checkpoint

pytestmark = pytest.mark.e2e
VERL = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}


def one_rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    from bebop.rl.trainer.outgoing import Outgoing
    from bebop.rl.verl import plugin

    plugin.register()
    from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict, get_init_weight_context_manager

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, policy = init_device_mesh("cpu", (2,)), folder / "policy"
    layout, source = Layout(policy), Tensors(policy)
    with get_init_weight_context_manager(use_meta_tensor="lm_head.weight" in source, mesh=mesh)():
        module = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    full = module.state_dict()
    apply_fsdp2(module, {"mesh": mesh, "reshard_after_forward": True}, {})
    fsdp2_load_full_state_dict(module, full, mesh)
    sent = dict(Outgoing(module, layout).backbone("cpu", torch.float32))
    assert sent.keys() == set(source) - layout.heads, sent.keys() ^ set(source)
    assert all(torch.equal(tensor, source[name]) for name, tensor in sent.items())
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo's that still runs may abort Python's teardown (torch 2.13)


@pytest.mark.parametrize(("model_type", "tied"), [("glm4_moe", False), ("llama", True)])
def test_each_rank_sends_the_checkpoint_whole(tmp_path: Path, model_type: str, tied: bool):
    random_checkpoint(tmp_path / "policy", model_type=model_type, num_heads=4, tied=tied)
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=os.environ | VERL) for rank in range(2)]
    assert [process.wait(timeout=300) for process in ranks] == [0, 0]


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), Path(sys.argv[2]))
