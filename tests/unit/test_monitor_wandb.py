"""wandb without network and without key: offline runs complete and say how to sync; nothing ever prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bebop.errors import LoggerError
from bebop.monitor import WandbSink, check_wandb
from bebop.records import DraftCounts, StepRecord
from bebop.store.definitions import definitions_table, flatten

PROGRAM = """
import sys
from bebop.errors import LoggerError
from bebop.monitor import JsonlSink, WandbSink, write_run_json
from bebop.records import DraftCounts, StepRecord
mode, run_dir, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
write_run_json(run_dir, "grpo", {"seed": 1})
try:
    sink = WandbSink(mode=mode, project="bebop", name=None, run_dir=run_dir)
except LoggerError as error:
    sys.exit(f"error: {error}")
with JsonlSink(run_dir) as jsonl, sink:
    for t in range(first, last):
        counts = DraftCounts(100, 300, (80, 48, 24 + t))
        record = StepRecord(t, 0.4 + 0.01 * t, counts, 3, "rejection", 1.0, extra={"rollout/spec_accept_length": 2.5})
        jsonl.write(record), sink.write(record)
        jsonl.write({"kind": "sft", "step": t, "loss": 0.5}), sink.write({"kind": "sft", "step": t, "loss": 0.5})
    sink.write_summary({"decision": "keep the heads", "slope": None})
"""


def run_program(mode: str, run_dir: Path, first: int = 0, last: int = 6) -> subprocess.CompletedProcess:
    """In a home without wandb's files, behind a proxy that is not there, with no terminal to answer a prompt."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and not k.lower().endswith("_proxy")}
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "https_proxy", "http_proxy"), "http://127.0.0.1:9")
    environment = {**keep, **nowhere, "HOME": str(run_dir.parent), "NETRC": str(run_dir.parent / "none")}
    command = [sys.executable, "-c", PROGRAM, mode, str(run_dir), str(first), str(last)]
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=run_dir.parent,
    )


def test_offline_run_completes_and_says_how_to_sync(tmp_path):
    run_dir = tmp_path / "a run, k=3"
    done = run_program("offline", run_dir)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "wandb sync" in line]
    folder = Path(line.split("wandb sync ")[1].strip("'"))
    assert folder.parent == run_dir / "wandb" and list(folder.glob("run-*.wandb"))
    written = next(folder.glob("run-*.wandb")).read_bytes()
    for key in (b"bebop/entropy_nats", b"bebop/by_entropy/acceptance_length", b"bebop/conditional_acceptance/depth_3",
                b"rollout/spec_accept_length", b"bebop/sft/loss", b"bebop/acceptance_over_entropy"):  # fmt: skip
        assert key in written, key
    assert len(list(folder.glob("files/media/table/bebop/*"))) == 3  # definitions, scatter, per depth

    again = run_program("offline", run_dir, first=6, last=8)
    assert again.returncode == 0, again.stderr
    scatter = max(
        run_dir.glob("wandb/offline-run-*/files/media/table/bebop/acceptance_over_entropy*"), key=os.path.getmtime
    )
    assert all(f"0.4{t}" in scatter.read_text() for t in range(1, 8)), "a resumed run's last folder is whole"


def test_online_without_a_key_is_one_line_before_anything_starts(tmp_path):
    done = run_program("online", tmp_path / "run")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: logger.wandb=online: no API key") and "logger.wandb=offline" in line
    assert not (tmp_path / "run" / "wandb").exists()


def test_disabled_writes_nothing(tmp_path):
    with WandbSink("disabled", "bebop", None, tmp_path) as sink:
        sink.write({"kind": "sft", "step": 0, "loss": 1.0})
        sink.write_summary({"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_unknown_mode_names_the_key_and_the_choices():
    with pytest.raises(LoggerError, match=r"logger\.wandb=on: expected one of offline, online, disabled"):
        check_wandb("on")


def test_logged_keys_are_namespaced_and_defined():
    record = StepRecord(3, 0.4, DraftCounts(100, 300, (80, 48, 24)), 3, "rejection", 1.0, reward_mean=0.5,
                        extra={"rollout/spec_accept_length": 2.5, "sync_s": 0.1})  # fmt: skip
    flat = flatten(record)
    assert flat["bebop/acceptance_length"] == pytest.approx(2.52) and flat["bebop/num_drafts"] == 100
    depths = [flat[f"bebop/conditional_acceptance/depth_{j}"] for j in (1, 2, 3)]
    assert depths == pytest.approx([0.8, 0.6, 0.5]) and flat["bebop/accepted/depth_3"] == 24
    assert flat["rollout/spec_accept_length"] == 2.5 and flat["bebop/sync_s"] == 0.1
    assert "bebop/staleness_mean" not in flat, "what was not measured is not logged"
    defined = {key.replace("/depth_j", "") for key, _, _ in definitions_table()}
    own = {key.split("/depth_")[0] for key in flat if key.startswith("bebop/")} - {"bebop/step", "bebop/sync_s"}
    assert own <= defined
    assert flatten({"kind": "sft_eval", "step": 1, "alpha": [0.8, 0.6], "time": 1.0}) == {
        "bebop/sft_eval/step": 1,
        "bebop/sft_eval/alpha/depth_1": 0.8,
        "bebop/sft_eval/alpha/depth_2": 0.6,
    }


def test_no_drafts_is_no_acceptance_value():
    flat = flatten(StepRecord(0, 0.4, DraftCounts(), 3, "rejection", 1.0))
    assert "bebop/acceptance_length" not in flat and flat["bebop/num_drafts"] == 0


def test_missing_wandb_is_one_line_that_names_the_override(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb("disabled")
    with pytest.raises(LoggerError, match=r"wandb is not installed; set logger\.wandb=disabled"):
        check_wandb("offline")
