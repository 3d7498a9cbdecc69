"""A user's own members: registered in a file outside the package, named by `plugins`, known in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOSS = """
from bebop.losses import LOSSES, HeadLoss

LOSSES.register("squared_tv", HeadLoss(of_overlap=lambda alpha: (1 - alpha).square().mean(0)))
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
