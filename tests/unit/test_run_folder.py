"""A run folder has one owner, and is resumed only by the run that began in it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bebop.errors import ConfigError, DiskError
from bebop.processes import ErrorFile, child_environment, marked
from bebop.store.run_folder import begin, new_folder, owned, sweep_folder

HOLD = """
import sys, time
from pathlib import Path
from bebop.store.run_folder import owned
with owned(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_process_in_a_run_folder_is_refused(tmp_path, owner):
    with pytest.raises(DiskError, match=f"process {owner.pid} .* runs there"), owned(tmp_path):
        pass
    owner.kill()
    owner.wait()
    with owned(tmp_path), owned(tmp_path / "." / ""):  # stages of one command nest
        pass


def test_owner_ends_what_a_killed_one_left(tmp_path):
    env = os.environ | child_environment(tmp_path)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    deadline = time.monotonic() + 10
    while marked(tmp_path) != [left.pid] and time.monotonic() < deadline:
        time.sleep(0.05)
    with owned(tmp_path):
        assert left.wait(5) == -9


def test_starts_in_the_same_second_get_folders_of_their_own(tmp_path):
    folders = {new_folder("sft", tmp_path) for _ in range(5)}
    assert len(folders) == 5 and all(folder.is_dir() for folder in folders)


def test_jobs_of_a_sweep_get_names_that_fit(tmp_path):
    words = [f"data.tasks=[{{name: {name}}}]" for name in ("a" * 200, "a" * 201)]
    folders = {sweep_folder(tmp_path, 0, [word]) for word in words}
    assert len(folders) == 2
    for folder in folders:
        folder.mkdir()


def test_folder_is_resumed_by_its_own_command_and_config_only(tmp_path):
    config = {"sft": {"lr": 0.1, "steps": 3}, "seed": 0}
    with begin(tmp_path, "sft", {**config, "seed": 2}):
        pass  # refused before any work
    with begin(tmp_path, "sft", config):
        (tmp_path / "metrics.jsonl").touch()
    with begin(tmp_path, "sft", {**config, "seed": 1}, free=("seed",)):
        pass
    with pytest.raises(ConfigError, match="holds a run of `sft`, not of `eval`"), begin(tmp_path, "eval", config):
        pass
    other = {"sft": {"lr": 0.2, "steps": 3}, "seed": 0}
    with pytest.raises(ConfigError, match=r"sft\.lr=0\.1, this one has sft\.lr=0\.2"), begin(tmp_path, "sft", other):
        pass


@pytest.mark.parametrize("how", ["file", "empty run.json", "below a file"])
def test_folder_that_cannot_be_one_is_refused_in_one_line(tmp_path, how):
    path = tmp_path / "run"
    if how == "empty run.json":
        path.mkdir()
        (path / "run.json").touch()
        (path / "metrics.jsonl").touch()
    else:
        path.touch()
    with (
        pytest.raises(ConfigError, match=str(path)) as caught,
        begin(path / "x" if how == "below a file" else path, "sft", {}),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_child_without_a_message_is_told_by_its_end(tmp_path):
    file = ErrorFile(tmp_path / "error.json")
    assert "exit code 3" in file.message(3, "above") and "SIGKILL" in file.message(-9, "above")
    (tmp_path / "error.json").touch()  # a disk that was full
    assert "exit code 3" in file.message(3, "above")
    file.clear()
    file.write(RuntimeError("shapes differ\n  here"))
    file.write(ConfigError("later"))
    assert file.message(1, "above").startswith("RuntimeError: shapes differ here (traceback in")


def test_child_whose_parent_has_ended_ends_at_once():
    code = "from bebop.processes import end_with_parent; end_with_parent(); print('alive')"
    for parent, alive in ((str(os.getpid()), True), ("1", False)):
        env = os.environ | {"BEBOP_PARENT": parent}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert ("alive" in done.stdout) is alive, done.stderr


def test_killed_parent_takes_its_children_along(tmp_path):
    child = (
        "import os, time; from bebop.processes import end_with_parent; end_with_parent(); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys; from bebop.processes import child_environment; "
        f"subprocess.run([sys.executable, '-c', {child!r}], env=os.environ | child_environment())"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 20
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    child_folder = Path(f"/proc/{pid.read_text()}")
    while child_folder.exists() and time.monotonic() < deadline + 5:
        time.sleep(0.05)
    assert not child_folder.exists()


def test_leaving_early_reports_no_leaked_semaphore():
    """tqdm's lock is a semaphore; the warning would follow the last line of a run."""
    code = "from tqdm import tqdm; list(tqdm(range(3))); from bebop.processes import leave; leave(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "leaked" not in done.stderr
