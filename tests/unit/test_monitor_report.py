"""The report is made from a run folder's JSON files alone, whatever the run got to."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bebop.monitor import JsonlSink, read_steps, write_report, write_run_json, write_summary
from bebop.records import DraftCounts, StepRecord

RL_PLOTS = {"acceptance_over_entropy", "over_steps", "conditional_acceptance", "decomposition"}


def write_rl(run_dir: Path, num_steps: int = 30, drafts: int = 1000, k_of=lambda t: 3) -> None:
    rng = np.random.default_rng(0)
    with JsonlSink(run_dir) as sink:
        for t in range(num_steps):
            entropy, k = float(0.4 + 0.05 * rng.standard_normal()), k_of(t)
            accepted = tuple(int(drafts * 0.8 ** (j + 1) * (1.2 - 0.5 * entropy)) for j in range(k))
            counts = DraftCounts(drafts, drafts * k, accepted)
            sink.write(StepRecord(t, entropy, counts, k, "rejection", 1.0, reward_mean=0.5 + t / 100))


def write_heads(run_dir: Path) -> None:
    with JsonlSink(run_dir) as sink:
        for step in range(1, 9):
            sink.write(
                {"kind": "sft", "step": step, "loss": 1 / step, "lr": 1e-3, "alpha": [0.8, 0.6], "loss_name": "e2e_tv"}
            )
            if step % 4 == 0:
                sink.write({"kind": "sft_eval", "step": step, "alpha": [0.8, 0.6], "acceptance_length": 2.2})


def plots_of(run_dir: Path) -> set[str]:
    found = set()
    for png in (run_dir / "plots").glob("*.png"):
        with Image.open(png) as image:
            assert image.width > 800 and len(image.convert("L").getcolors(256)) > 10, f"{png} is empty"
        found.add(png.stem)
    return found


def text_of(page: Path) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", page.read_text()).split()))


def test_report_needs_only_the_runs_json_files(tmp_path):
    first, copy = tmp_path / "first", tmp_path / "copy <of> it"
    write_run_json(first, "demo", {"seed": 0, "monitor": {"early_steps": 15, "min_steps": 8, "min_mismatch": 0.05}})
    write_heads(first)
    write_rl(first)
    copy.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(first / name, copy / name)
    shutil.rmtree(first)

    page = write_report(copy)

    assert page == copy / "report.html" and plots_of(copy) == RL_PLOTS | {"sft_curves"}
    source, text = page.read_text(), text_of(page)
    assert source.count("data:image/png;base64,") == 5
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|<script""", source)
    assert "copy &lt;of&gt; it" in source and "<of>" not in source
    assert "Update the heads online? Keep the heads." in text and "Mismatch over steps 23 to 29" in text
    assert "not finished" in text
    for definition in (
        "pooled over the step's requests",
        "Rule: rejection; temperature 1",
        "sum min(p, q)",
    ):
        assert definition in text, definition


def test_report_of_a_running_run_with_a_torn_line(tmp_path):
    write_rl(tmp_path, num_steps=6)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    text = text_of(write_report(tmp_path))
    assert len(read_steps(tmp_path)) == 5 and "5 RL steps, not finished" in text
    assert "Undetermined: 5 steps with drafts, at least 9 are needed" in text and "No decomposition" in text
    assert plots_of(tmp_path) == RL_PLOTS - {"decomposition"}

    write_rl(tmp_path)
    write_summary(tmp_path, {})
    assert "30 RL steps, finished" in text_of(write_report(tmp_path)) and plots_of(tmp_path) == RL_PLOTS


def test_report_of_heads_alone_has_no_decision(tmp_path):
    write_heads(tmp_path)
    text = text_of(write_report(tmp_path))
    assert plots_of(tmp_path) == {"sft_curves"} and "Update the heads" not in text and "Loss: e2e_tv" in text


def test_report_without_drafts_says_so_and_shows_no_acceptance(tmp_path):
    write_rl(tmp_path, drafts=0)
    text = text_of(write_report(tmp_path))
    assert plots_of(tmp_path) == {"over_steps"}
    assert (
        "No data: no step of 30 has drafts" in text
        and "No drafts were observed" in text
        and "Nothing was drafted" in text
    )


def test_report_keeps_draft_lengths_apart(tmp_path):
    write_rl(tmp_path, num_steps=40, k_of=lambda t: 1 if t < 20 else 3)
    text = text_of(write_report(tmp_path))
    assert "k=1, rejection, T=1 20" in text and "k=3, rejection, T=1 20" in text


def test_report_of_a_folder_without_records_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no records in metrics\.jsonl; give the folder of a run"):
        write_report(tmp_path)


def test_importing_the_monitor_imports_no_plotting_and_no_wandb():
    import subprocess
    import sys

    code = (
        "import sys, bebop.monitor; print([m for m in ('matplotlib', 'wandb', 'torch', 'pandas') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
