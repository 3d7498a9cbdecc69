"""Heads around transformers' layers under the real trainer: experts and a frozen correction under ZeRO-1 and 3."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from bebop.config import Data, Loss, Model, RolloutSection, Sft, SftConfig, Task
from bebop.monitor import read_records
from bebop.mtp import is_head_name
from bebop.mtp.checkpoint import Tensors, read_config
from bebop.policies import random_checkpoint
from bebop.sft import run

pytestmark = pytest.mark.e2e


def trained(tmp_path, monkeypatch, policy, zero_stage: int):
    """(losses, scored acceptance lengths, written checkpoint) of eight steps on given text."""
    monkeypatch.setenv("BEBOP_HOME", str(tmp_path / "home"))
    sums = [f"Calculate {' + '.join(str(a * b % 97) for b in range(2, 4 + a % 9))}\nAnswer: {a}" for a in range(30)]
    parquet.write_table(pa.table({"text": sums}), tmp_path / "sums.parquet")
    config = SftConfig(
        model=Model(name="hf", path=policy),
        data=Data(source="parquet", path=tmp_path / "sums.parquet", tasks=[Task(name="chain_sum")], num_heldout=6),
        loss=Loss(name="e2e_tv"),
        sft=Sft(steps=8, batch_tokens=256, eval_every=8, save_every=8, lr=5e-3, zero_stage=zero_stage),
        rollout=RolloutSection(),
    )
    run_dir = tmp_path / f"zero{zero_stage}"
    result = run(config, run_dir)
    losses = [record["loss"] for record in read_records(run_dir, "sft")]
    scores = [record["acceptance_length"] for record in read_records(run_dir, "sft_eval")]
    return losses, scores, Tensors(result.checkpoint)


def test_experts_train_alike_under_zero_1_and_3(tmp_path, monkeypatch):
    policy = random_checkpoint(tmp_path / "policy", model_type="deepseek_v3", num_heads=4)
    before, config = Tensors(policy), read_config(policy)
    (one, _, written), (three, _, again) = (trained(tmp_path, monkeypatch, policy, stage) for stage in (1, 3))
    assert one == pytest.approx(three, rel=1e-5)
    for name, tensor in before.items():
        learns = is_head_name(name, config) and not name.endswith("e_score_correction_bias")
        assert torch.equal(written[name], tensor) != learns, name
        # AdamW's first steps are of size lr whatever the gradient's: where that is near 0, rounding decides much
        torch.testing.assert_close(written[name], again[name], atol=1e-4, rtol=1e-4)


def test_a_policy_with_linear_attention_and_experts_trains_its_heads(tmp_path, monkeypatch):
    policy = random_checkpoint(tmp_path / "policy", model_type="qwen3_next", num_heads=4)
    before, config = Tensors(policy), read_config(policy)
    _, scores, written = trained(tmp_path, monkeypatch, policy, 1)
    assert scores[-1] > scores[0]
    assert written.files.keys() == before.files.keys()
    assert all(torch.equal(written[n], t) != is_head_name(n, config) for n, t in before.items())
