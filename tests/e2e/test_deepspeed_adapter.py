"""The adapter against plain torch, in a process of its own: gradients of one mean over anchors, and no compiler."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from bebop.sft.deepspeed_adapter import Trainer, deepspeed_config, init_process_group

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
                  "moved": moved}))
trainer.close()
"""


def test_uneven_micro_batches_give_the_gradient_of_one_mean(tmp_path):
    """3 micro-batches of 2, 7 and 1 anchors; the given learning rate is the one used; nothing is compiled."""
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "PATH": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "rendezvous")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["norm"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["mean"] == pytest.approx([found["loss"]] * 2, rel=1e-5)
    assert found["still"]
    assert found["moved"] == pytest.approx([1e-2] * 2, rel=0.5)
    assert not (tmp_path / "extensions").exists()
