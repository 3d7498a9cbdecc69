"""The adapter against plain torch, in a process of its own: gradients of one mean over anchors, and no compiler."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from bebop.sft.deepspeed import Trainer, deepspeed_config, init_process_group

class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, batch):
        errors = self.linear(batch).squeeze(1) ** 2
        return errors.mean(), errors.detach().mean().reshape(1)

torch.manual_seed(0)
batches = [torch.randn(n, 4) for n in (2, 7, 1)]
plain = Toy()
loss, _ = plain(torch.cat(batches))
loss.backward()
expected = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm().item()

init_process_group("cpu", Path(sys.argv[1]), 0, 1)
group = torch.distributed.distributed_c10d._get_default_group()
patience = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
toy = Toy()
toy.load_state_dict(plain.state_dict())
config = deepspeed_config(optimizer="adamw", zero_stage=1, grad_accum=3, grad_clip=1e-3, lr=0.5, weight_decay=0.0)
trainer = Trainer(toy, config)
mean = trainer.step(batches, [2, 7, 1], 10, lr=0.0)
still = all(torch.equal(a, trainer.parameters()[n]) for n, a in plain.state_dict().items())
norm = trainer.grad_norm()
trainer.step(batches, [2, 7, 1], 10, lr=1e-2)
moved = [(a - trainer.parameters()[n]).abs().max().item() for n, a in plain.state_dict().items()]
print(json.dumps({"expected": expected, "norm": norm, "loss": loss.item(), "mean": mean.tolist(), "still": still,
                  "moved": moved, "patience": patience}))
trainer.close()
sys.stdout.flush()
os._exit(0)  # a thread of gloo's that still runs may abort Python's teardown (torch 2.13)
"""


MUON = """
import copy, json, os, sys
from pathlib import Path
import torch
from bebop.sft.deepspeed import Trainer, deepspeed_config, init_process_group

class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.tall = torch.nn.Linear(48, 16, bias=False), torch.nn.Linear(16, 32)
    def forward(self, batch):
        errors = (self.tall(torch.tanh(self.wide(batch))) - batch[:, :32]).square().sum(1)
        return errors.mean(), errors.detach().mean().reshape(1)

CLIP, LR, DECAY, STEPS = 0.1, 0.02, 0.1, 12
torch.manual_seed(0)
start = Toy()
counts = (2, 7, 1)
# the first steps' gradients are a hundred times the later ones'
steps = [[torch.randn(n, 48) * (5.0 if i < 2 else 0.5) for n in counts] for i in range(STEPS)]

def by_torch(clip):
    toy = copy.deepcopy(start)
    optimizers = [
        torch.optim.Muon([p for p in toy.parameters() if p.ndim == 2], lr=LR, weight_decay=DECAY, momentum=0.95,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in toy.parameters() if p.ndim < 2], lr=LR, betas=(0.9, 0.95), weight_decay=DECAY),
    ]
    for batches in steps:
        sums = [torch.zeros_like(p) for p in toy.parameters()]
        for batch in batches:
            for total, g in zip(sums, torch.autograd.grad(toy(batch)[0], list(toy.parameters()))):
                total += min(1.0, clip / 3**0.5 / g.norm().item()) * g * len(batch) / 10
        for p, g in zip(toy.parameters(), sums):
            p.grad = g
        for optimizer in optimizers:
            optimizer.step()
    return toy

init_process_group("cpu", Path(sys.argv[1]), 0, 1)
toy = copy.deepcopy(start)
config = deepspeed_config(optimizer="muon", zero_stage=1, grad_accum=3, grad_clip=CLIP, lr=LR, weight_decay=DECAY)
trainer = Trainer(toy, config, CLIP)
for batches in steps:
    trainer.step(batches, counts, 10, lr=LR)
ours = trainer.parameters()

def distance(other):
    return {n: ((ours[n] - p).norm() / (ours[n] - start.get_parameter(n)).norm()).item()
            for n, p in other.named_parameters()}

print(json.dumps({"clipped": distance(by_torch(CLIP)), "not": distance(by_torch(1e9))}))
trainer.close()
sys.stdout.flush()
os._exit(0)  # a thread of gloo's that still runs may abort Python's teardown (torch 2.13)
"""


def _run(script, tmp_path):
    env = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "PATH": "/nonexistent",
        "TORCH_COMPILE_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "rendezvous")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "extensions").exists()
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_muon_scales_updates_and_clips_gradients_before_momentum(tmp_path):
    """Relative to the way that training went; both orthogonalise in bfloat16. Unclipped, it goes elsewhere."""
    found = _run(MUON, tmp_path)
    assert max(found["clipped"].values()) < 0.03, found
    assert min(found["not"][name] for name in ("wide.weight", "tall.weight")) > 0.15, found


def test_uneven_micro_batches_give_the_gradient_of_one_mean(tmp_path):
    """3 micro-batches of 2, 7 and 1 anchors; the given learning rate is the one used; nothing is compiled."""
    found = _run(SCRIPT, tmp_path)
    assert found["norm"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["mean"] == pytest.approx([found["loss"]] * 2, rel=1e-5)
    assert found["still"]
    assert found["moved"] == pytest.approx([1e-2] * 2, rel=0.5)
    assert found["patience"] == 24 * 3600, "DeepSpeed's own is 10 minutes, less than a backbone takes over large data"
