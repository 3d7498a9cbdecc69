"""The real training on a random policy and given text: DeepSpeed in processes of its own, killed and resumed."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from bebop.config import Data, Loss, Model, RolloutSection, Sft, SftConfig, Task
from bebop.errors import ConfigError
from bebop.monitor import read_records
from bebop.mtp import HEAD_PREFIX, load_heads
from bebop.mtp.checkpoint import Tensors
from bebop.sft import run

pytestmark = pytest.mark.e2e
COMMAND = "import sys; from pathlib import Path; from bebop.config import SftConfig; from bebop.sft import run; "
COMMAND += "run(SftConfig.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))"
SFT = Sft(steps=24, grad_accum=2, batch_tokens=256, eval_every=12, save_every=8, lr=2e-3)


@pytest.fixture(scope="module")
def config(tiny_random, tmp_path_factory) -> Iterator[SftConfig]:
    """Sums of uneven length as given text; 2 micro-batches a step."""
    folder = tmp_path_factory.mktemp("given")
    sums = [f"Calculate {' + '.join(str(a * b % 97) for b in range(2, 4 + a % 9))}\nAnswer: {a}" for a in range(60)]
    parquet.write_table(pa.table({"text": sums}), folder / "sums.parquet")
    made = SftConfig(
        model=Model(name="hf", path=tiny_random),
        data=Data(source="parquet", path=folder / "sums.parquet", tasks=[Task(name="chain_sum")], num_heldout=12),
        loss=Loss(name="e2e_tv", warmup="kl", warmup_share=0.25),
        sft=SFT,
        rollout=RolloutSection(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEBOP_HOME", str(folder / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")  # the order of sums, and so the last bit, follows the number of threads
        yield made


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """An uninterrupted run of one process."""
    return run(config, tmp_path_factory.mktemp("whole"))


def _curve(run_dir):
    return [record["loss"] for record in read_records(run_dir, "sft")]


def _scores(run_dir):
    return [record["acceptance_length"] for record in read_records(run_dir, "sft_eval")]


def test_heads_move_and_every_other_tensor_stays_as_it_was(whole, tiny_random):
    before, after = Tensors(tiny_random), Tensors(whole.checkpoint)
    assert set(before) == set(after)
    for name in before:
        assert torch.equal(before[name], after[name]) == (not name.startswith(HEAD_PREFIX)), name
    assert load_heads(whole.checkpoint) is not None


def test_training_raises_held_out_acceptance_and_says_what_it_did(whole):
    run_dir = whole.checkpoint.parent
    losses = _curve(run_dir)
    assert len(losses) == SFT.steps
    assert _scores(run_dir)[-1] > _scores(run_dir)[0]
    assert [r["loss_name"] for r in read_records(run_dir, "sft")] == ["kl"] * 6 + ["e2e_tv"] * 18
    made = json.loads((whole.checkpoint / "bebop.json").read_text())
    assert (made["mtp_depth"], made["loss"], made["temperature"]) == (3, "e2e_tv", 1.0)
    assert made["acceptance_length"] == pytest.approx(_scores(run_dir)[-1])
    low, high = made["entropy_range"]
    assert 0 < low < made["entropy_nats"] < high
    assert whole.summary["acceptance_length"] == made["acceptance_length"]


def test_killed_training_goes_on_to_the_same_curve(config, whole, tmp_path):
    """kill -9 on the command between two checkpoints, then the same command: losses and heads equal to the bit."""
    (tmp_path / "config.json").write_text(config.model_dump_json())
    run_dir = tmp_path / "run"
    command = subprocess.Popen([sys.executable, "-c", COMMAND, str(tmp_path / "config.json"), str(run_dir)])
    deadline = time.monotonic() + 120
    while len(_curve(run_dir)) < 11 and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = _children(command.pid)
    command.send_signal(signal.SIGKILL)
    command.wait()
    assert workers, "the training was over before it could be killed"
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, f"training processes {workers} outlive the command"
        time.sleep(0.05)
    assert 11 <= len(_curve(run_dir)) < SFT.steps
    assert not (run_dir / "sft_result.json").exists()
    resumed = run(config, run_dir)
    assert _curve(run_dir) == _curve(whole.checkpoint.parent)
    assert _scores(run_dir) == _scores(whole.checkpoint.parent)
    assert resumed.summary["heads_checksum"] == whole.summary["heads_checksum"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    repeated = [line["step"] for line in lines if line["kind"] == "sft"]
    assert len(repeated) < 2 * SFT.steps and 1 in repeated and repeated.count(1) == 1, "it began again from step 1"


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_processes_under_zero_train_like_one(config, whole, zero_stage, tmp_path):
    """Two processes with one micro-batch each do what one process with two does, with partitioned gradients, and
    parameters too; from hidden states on disk, which one of them wrote."""
    sft = SFT.model_copy(update={"grad_accum": 1, "num_processes": 2, "zero_stage": zero_stage})
    data = config.data.model_copy(update={"cache_hidden": "disk"})
    together = run(config.model_copy(update={"sft": sft, "data": data}), tmp_path)
    assert _curve(tmp_path) == pytest.approx(_curve(whole.checkpoint.parent), abs=1e-5)
    assert together.summary["acceptance_length"] == pytest.approx(whole.summary["acceptance_length"], abs=1e-4)


def test_bfloat16_compute_and_checkpointed_mlps_train_float32_heads(config, whole, tmp_path):
    sft = SFT.model_copy(update={"compute_dtype": "bfloat16", "activation_checkpointing": True, "zero_stage": 2})
    low = run(config.model_copy(update={"sft": sft}), tmp_path)
    assert _curve(tmp_path) == pytest.approx(_curve(whole.checkpoint.parent), abs=5e-3)
    assert _curve(tmp_path) != _curve(whole.checkpoint.parent), "bfloat16 arithmetic leaves a trace"
    heads = load_heads(low.checkpoint)
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
    assert any((p != p.bfloat16().float()).any() for p in heads.parameters()), "the master weights are float32"
    card = (low.checkpoint / "README.md").read_text()
    assert "`e2e_tv`, after `kl` for the first 25% of the steps" in card and "| sums " in card


@pytest.fixture(scope="module")
def headless(tiny_random, tmp_path_factory) -> Path:
    """The random policy without its MTP layer."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("headless") / "policy"
    shutil.copytree(tiny_random, folder)
    tensors, values = Tensors(tiny_random), json.loads((tiny_random / "config.json").read_text())
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    kept = {name: tensors[name].contiguous() for name in tensors if not name.startswith(HEAD_PREFIX)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    del values["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _by_muon(config, headless, folder, **changes):
    """Hidden-state regression, then the loss, from fresh heads."""
    sft = {"steps": 8, "regression_steps": 8, "optimizer": "muon", "lr": 1e-2, "batch_tokens": 256, "grad_accum": 2}
    sft = Sft(**{**sft, "eval_every": 8, "save_every": 8, **changes})
    model = Model(name="hf", path=headless)
    return run(config.model_copy(update={"model": model, "sft": sft, "loss": Loss(name="e2e_tv")}), folder)


@pytest.fixture(scope="module")
def muon(config, headless, tmp_path_factory):
    return _by_muon(config, headless, tmp_path_factory.mktemp("muon"))


def test_fresh_heads_regress_hidden_states_before_the_loss(muon):
    records, scores = read_records(muon.checkpoint.parent, "sft"), _scores(muon.checkpoint.parent)
    assert [r["loss_name"] for r in records] == ["hidden_regression"] * 8 + ["lk"] * 5 + ["e2e_tv"] * 3
    assert ["alpha" in r for r in records] == [False] * 8 + [True] * 8
    assert records[7]["loss"] < 0.9 * records[0]["loss"]
    assert len(scores) == 3 and scores == sorted(scores), "each part brought the acceptance up"
    assert muon.summary["regression_steps"] == 8


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_muon_over_two_processes_trains_like_one(config, headless, muon, zero_stage, tmp_path):
    """DeepSpeed orthogonalises whole matrices under every partitioning; in bfloat16, hence the width."""
    _by_muon(config, headless, tmp_path, grad_accum=1, num_processes=2, zero_stage=zero_stage)
    assert _curve(tmp_path) == pytest.approx(_curve(muon.checkpoint.parent), abs=5e-3)


def test_a_finished_run_is_not_trained_again(config, whole):
    again = run(config, whole.checkpoint.parent)
    assert again.summary["heads_checksum"] == whole.summary["heads_checksum"]
    assert len(_curve(whole.checkpoint.parent)) == SFT.steps
    other = config.model_copy(update={"loss": Loss(name="tv")})
    with pytest.raises(ConfigError, match=r"loss.name=e2e_tv, this one has loss.name=tv"):
        run(other, whole.checkpoint.parent)


def test_a_worker_s_error_is_one_line(config, tmp_path):
    from bebop.sft import SftError

    sft = SFT.model_copy(update={"batch_tokens": 64})
    text = tmp_path / "long.parquet"
    parquet.write_table(pa.table({"text": ["1 + 2 " * 60] * 20}), text)
    long = config.model_copy(update={"sft": sft, "data": config.data.model_copy(update={"path": text})})
    with pytest.raises(SftError, match=r"max_tokens=64; raise sft.batch_tokens") as error:
        run(long, tmp_path / "run")
    assert "\n" not in str(error.value)
