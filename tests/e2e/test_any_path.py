"""The whole story where every path has odd characters, by a user without a home, on a model that is read-only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

ODD = "é 'q\" a=b [c] {d} (e) #f; g,h $i $j &k %20 ~l @m +n !o ^p `q` |r <s> *t? \\u"
COLON = ":v"  # no virtual environment and no PYTHONPATH can lie under it, everything else can
SUMS = [f"Calculate {a} + {b}.\nAnswer: {a + b}" for a in range(8) for b in range(8)]
SMALL = ("data.max_prompt_tokens=64", "data.max_response_tokens=24", "data.num_prompts=16", "data.num_heldout=12")


@pytest.fixture(scope="module")
def place(repo: Path, tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkout/, home/, tmp/, a read-only model/ and sums.parquet."""
    base = tmp_path_factory.mktemp("any") / ODD
    checkout, rest = base / "checkout", base / COLON
    for name in ("bebop", "configs", "kernels", "recipes", "pyproject.toml"):
        copy = shutil.copytree if (repo / name).is_dir() else shutil.copy
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        copy(repo / name, checkout / name)
    for name in ("home", "tmp"):
        (rest / name).mkdir(parents=True)
    shutil.copytree(tiny_random, rest / "model")
    for path in (*(rest / "model").iterdir(), rest / "model"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    pyarrow.parquet.write_table(pyarrow.table({"text": SUMS}), rest / "sums.parquet")
    return rest


def homeless() -> list[str]:
    """What starts a command as a user without a home and without root's rights, where the kernel allows it."""
    words = ["unshare", "--user"]
    allowed = (
        shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    )
    return words if allowed else []


def bebop(place: Path, *words: str) -> str:
    """Run a command of the checkout in `place`; returns the last line that it printed."""
    checkout = place.parent / "checkout"
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "BEBOP_PLUGINS")}
    env |= {
        "PYTHONPATH": os.pathsep.join((str(checkout), str(checkout / "kernels"))),
        "BEBOP_HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
    }
    done = subprocess.run(
        [*homeless(), sys.executable, "-m", "bebop.cli", *words],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def heads(place: Path) -> Path:
    words = [f"model.path={place / 'model'}", f"data.path={place / 'sums.parquet'}", f"run_dir={place / 'heads'}"]
    steps = ("sft.steps=4", "sft.eval_every=4", "sft.save_every=2", "sft.batch_tokens=256")
    last = bebop(place, "sft", "model=hf", "data.source=parquet", *words, *SMALL, *steps, "logger.wandb=offline")
    assert last == str(place / "heads")
    return place / "heads" / "checkpoint"


def test_dry_runs_take_any_path(place: Path):
    for command in ("sft", "grpo", "eval", "bench"):
        bebop(
            place,
            command,
            f"run_dir={place / 'dry'}",
            "recipe=losses" if command == "sft" else "model=tiny",
            "--dry-run",
        )


def test_heads_are_trained_and_evaluated(place: Path, heads: Path):
    words = ("model=hf", f"model.path={heads}", "rollout=torch", f"run_dir={place / 'eval'}", *SMALL)
    assert bebop(place, "eval", *words) == str(place / "eval")
    assert json.loads((place / "eval" / "summary.json").read_text())["tasks"]


def test_grpo_samples_trains_and_reports(place: Path, heads: Path):
    run_dir = place / "grpo"
    words = ("model=hf", f"model.path={heads}", "rollout.max_model_len=128", "rollout.kv_cache_gib=0.25")
    few = ("grpo.steps=1", "grpo.prompts_per_step=2", "grpo.group_size=2")
    assert bebop(place, "grpo", *words, *few, *SMALL[:2], "trainer=sync", f"run_dir={run_dir}") == str(run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["checkpoint"]
    (run_dir / "report.html").unlink()
    assert bebop(place, "report", str(run_dir)) == str(run_dir / "report.html")


def test_doctor_writes_its_verdict(place: Path):
    assert bebop(place, "doctor", "doctor.engine=torch", "doctor.num_requests=100", f"run_dir={place / 'doctor'}")
    assert json.loads((place / "doctor" / "summary.json").read_text())["checks"]


def test_model_directory_is_left_as_it_was(place: Path, tiny_random: Path, heads: Path):
    assert sorted(path.name for path in (place / "model").iterdir()) == sorted(
        path.name for path in tiny_random.iterdir()
    )
