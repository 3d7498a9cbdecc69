"""A user's own members: registered in a file outside the package, named by `plugins`, known in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LOSS = """
from bebop.losses import LOSSES, HeadLoss

LOSSES.register("squared_tv", HeadLoss(of_overlap=lambda alpha: (1 - alpha).square().mean(0)))
"""

RULE = """
from bebop.spec import RULES
from bebop.spec.rules.rejection import Rejection


class Lazy(Rejection):
    name = title = "lazy"

    def tests(self, *arguments):
        tests = super().tests(*arguments)
        return tests._replace(mass=0.5 * tests.mass.minimum(tests.scale))

    def after_rejection(self, target, draft, token, weight):
        left = target - 0.5 * target.minimum(draft)
        return left / left.sum(-1, keepdim=True)

    def given_text(self, scores):
        halves = 0.5 ** torch.arange(1, len(scores.alpha) + 1)[:, None]
        return halves * super().given_text(scores)

    def expected(self, scores):
        halves = 0.5 ** torch.arange(1, len(scores.alpha) + 1)[:, None]
        return halves * super().expected(scores)


import torch

RULES.register("lazy", Lazy())
"""


def bebop(*words: str, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bebop.cli", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_losses.py").write_text(LOSS)
    return tmp_path


@pytest.mark.parametrize("plugin", ["my_losses", "./my_losses.py"])
def test_a_loss_from_a_users_file_is_accepted(folder, plugin):
    done = bebop(
        "sft", f"plugins=[{plugin}]", "loss.name=squared_tv", "loss.warmup=squared_tv", "--dry-run", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "name: squared_tv" in done.stdout and plugin in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss.name=squared_tv"], "loss.name: got 'squared_tv', expected one of hard_ce, "),
        (["loss.name=e2e_tvv"], "did you mean e2e_tv?"),
        (["loss.warmup=ik"], "loss.warmup: got 'ik', expected one of "),
        (["plugins=[no_such_module]"], "plugins: got no_such_module, expected a module on Python's path"),
        (["plugins=[./absent.py]"], "plugins: got ./absent.py, expected a Python file"),
    ],
)
def test_an_absent_member_or_plugin_is_refused_in_one_line(folder, words, message):
    done = bebop("sft", *words, "--dry-run", cwd=folder)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_processes_that_a_run_starts_know_its_plugins(folder):
    code = (
        "import subprocess, sys\n"
        "from bebop import registry\n"
        "registry.use(['./my_losses.py'])\n"
        "subprocess.run([sys.executable, '-c', 'from bebop.losses import LOSSES; print(\"squared_tv\" in LOSSES)'],"
        " cwd='/', check=True)\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "BEBOP_PLUGINS"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_name_is_registered_once(folder):
    code = "from bebop.losses import LOSSES; LOSSES.register('tv', LOSSES['lk'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "loss 'tv' is registered already" in done.stderr


def test_users_rule_is_proven_and_scored_like_built_in_ones(tmp_path):
    """A rule that accepts half of what it could is lossless; nothing but its file is added."""
    (tmp_path / "my_rule.py").write_text(RULE)
    code = (
        "from bebop import registry\n"
        "registry.use(['./my_rule.py'])\n"
        "from bebop.doctor.checks import check_rule\n"
        "for row in check_rule(0): print(row.check, row.passed)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "rule lazy, enumerated in float64 True" in done.stdout
    words = ["plugins=[./my_rule.py]", "rollout.rule=lazy", "--dry-run"]
    refused = bebop("eval", *words, "rollout=vllm", cwd=tmp_path)
    assert refused.returncode == 2 and "rollout.rule: got lazy with rollout.engine=vllm" in refused.stderr
    assert bebop("eval", *words, "rollout=torch", cwd=tmp_path).returncode == 0


ENGINE = """
from bebop.engines import ENGINES, EngineInfo


def make(*arguments, **settings):
    from bebop.engines.torch_engine import TorchEngine

    print("the engine of my_engine.py starts", flush=True)
    return TorchEngine(*arguments, **settings)


ENGINES.register("mine", EngineInfo(make=make))
"""

TASK = """
from bebop.data import TASKS, TaskSource


class Echo:
    def __init__(self, params):
        self.length = params.get("length", 3)

    def __getitem__(self, i):
        word = str(i)[: self.length]
        return {"question": f"Repeat {word}{i}", "answer": f"{word}{i}"}


TASKS.register("echo", TaskSource(items=Echo, verify=lambda answer, item: float(answer == item["answer"])))
"""


def test_a_task_from_a_users_file_gives_prompts_and_rewards(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    code = (
        "from bebop import registry\n"
        "registry.use(['./my_task.py'])\n"
        "from bebop.config import Task\n"
        "from bebop.data import make_prompts\n"
        "from bebop.data.tasks import pack\n"
        "from bebop.verifiers import VerifierBox\n"
        "prompts = make_prompts([Task(name='echo', params={'length': 2})], 3, 0, 'rl')\n"
        "with VerifierBox() as box:\n"
        "    for p in prompts:\n"
        "        for text in (f\"Answer: {p.entry['answer']}\", 'Answer: x'):\n"
        "            print(box.score(data_source=p.task, solution_str=text, ground_truth=pack(p)).score)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1.0", "0.0"] * 3


@pytest.mark.e2e
def test_users_rule_engine_and_task_run_in_eval(tmp_path, tiny_random):
    (tmp_path / "my_rule.py").write_text(RULE)
    (tmp_path / "my_engine.py").write_text(ENGINE)
    (tmp_path / "my_task.py").write_text(TASK)
    words = ["model=hf", f"model.path={tiny_random}", "model.dtype=float32", "data.num_heldout=24"]
    words += ["rollout=torch", "rollout.rule=lazy", "plugins=[./my_rule.py,./my_engine.py,./my_task.py]", "run_dir=run"]
    words += ["logger.wandb=disabled", "rollout.engine=mine", "data.tasks=[{name: echo}]"]
    done = bebop("eval", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    scored, agreement = summary["tasks"]["all"]["scored"], summary["tasks"]["all"]["agreement"]
    assert summary["rule"] == "lazy" and agreement["agrees"]
    assert "the engine of my_engine.py starts" in done.stdout
    assert scored["accepted_lazy"][0] == pytest.approx(0.5 * scored["accepted"][0])
    assert "scored_lazy" in (tmp_path / "run" / "eval.csv").read_text()
