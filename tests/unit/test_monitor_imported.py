"""Records of other trainers become steps that slope, decomposition and report read."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from bebop import cli
from bebop.errors import BadInput
from bebop.monitor import read_steps
from bebop.monitor.imported import read_source, steps_of

SETTINGS = {"num_speculative_tokens": 3, "acceptance_rule": "rejection", "temperature": 1.0}
ENTROPY = [0.50, 0.46, 0.43, 0.41, 0.36, 0.33, 0.31, 0.28]
LENGTH = [2.40, 2.43, 2.44, 2.46, 2.48, 2.49, 2.50, 2.52]


def imported(path):
    return steps_of(read_source(path)[1], **SETTINGS)


def csv_of_counts(path):
    rows = ["step,entropy_nats,reward_mean,num_drafts,accepted_1,accepted_2"]
    rows += [f"{t},{h},0.5,1000,{round(600 * (y - 1))},{round(400 * (y - 1))}" for t, (h, y) in enumerate(pairs())]
    path.write_text("\n".join(rows))
    return path


def pairs():
    return zip(ENTROPY, LENGTH, strict=True)


def verl_console(path):
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    lines = ["loading", "\x1b[36m(TaskRunner pid=7)\x1b[0m " + concat_dict_to_str({"val/score": 0.1}, step=0)]
    for t, (h, y) in enumerate(pairs(), start=1):
        values = {"actor/entropy": h, "critic/score/mean": 0.25, "rollout/spec_accept_length": y, "timing_s/step": 9.5}
        lines.append("\x1b[36m(TaskRunner pid=7)\x1b[0m " + concat_dict_to_str(values, step=t))
    path.write_text("\n".join(lines))
    return path


def test_csv_of_raw_counts_keeps_them(tmp_path):
    steps = imported(csv_of_counts(tmp_path / "run.csv"))
    assert [step.step for step in steps] == list(range(8))
    assert steps[0].counts.num_drafts == 1000 and steps[0].counts.accepted_per_depth == (840, 560)
    assert steps[0].acceptance_length == pytest.approx(2.4) and steps[0].reward_mean == 0.5
    assert steps[0].num_speculative_tokens == 3


def test_console_of_verl_has_entropy_reward_and_length(tmp_path):
    kind, rows = read_source(verl_console(tmp_path / "out.log"))
    steps = steps_of(rows, **SETTINGS)
    assert kind == "verl console" and len(steps) == 9
    assert [step.entropy_nats for step in steps[1:]] == ENTROPY
    assert [step.acceptance_length for step in steps[1:]] == LENGTH
    assert steps[1].counts is None and steps[1].reward_mean == 0.25 and steps[1].step_s == 9.5
    assert steps[0].acceptance_length is None and steps[0].extra == {"val/score": 0.1}


def test_pages_of_vllm_counters_become_counts_per_step(tmp_path):
    registry = CollectorRegistry()
    drafts = Counter("vllm:spec_decode_num_drafts", "", ["engine"], registry=registry)
    tokens = Counter("vllm:spec_decode_num_draft_tokens", "", ["engine"], registry=registry)
    depth = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "", ["engine", "position"], registry=registry)
    for step in range(4):
        for engine in "01":
            drafts.labels(engine).inc(100 if step else 7)
            tokens.labels(engine).inc(300 if step else 21)
            for position, accepted in enumerate((80, 48, 24)):
                depth.labels(engine, str(position)).inc(accepted if step else 1)
        (tmp_path / f"step_{step}.prom").write_bytes(generate_latest(registry))
    kind, rows = read_source(tmp_path)
    assert kind == "prometheus" and sorted(rows) == [1, 2, 3]
    with pytest.raises(BadInput, match="without entropy_nats"):
        steps_of(rows, **SETTINGS)
    for row in rows.values():
        row["entropy_nats"] = "0.4"
    steps = steps_of(rows, **SETTINGS)
    assert [step.counts.num_drafts for step in steps] == [200] * 3
    assert [step.counts.accepted_per_depth for step in steps] == [(160, 96, 48)] * 3
    assert steps[0].acceptance_length == pytest.approx(2.52)


def test_offline_run_of_wandb_is_read_without_its_server(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="other", dir=tmp_path)
    for t, (h, y) in enumerate(pairs(), start=1):
        long = {f"filler/{i}_{'x' * 200}": float(i) for i in range(100)}  # larger than a block of the file's format
        run.log({"actor/entropy": h, "rollout/spec_accept_length": y, "critic/score/mean": 0.5, **long}, step=t)
    folder = tmp_path / "wandb" / run.dir.split("/wandb/")[1].split("/")[0]
    run.finish()
    deadline = time.monotonic() + 60
    while len((found := read_source(folder))[1]) < 8 and time.monotonic() < deadline:
        time.sleep(0.2)  # wandb's own process writes on after `finish` has returned
    kind, rows = found
    steps = steps_of(rows, **SETTINGS)
    assert kind == "wandb" and [step.step for step in steps] == list(range(1, 9))
    assert [step.acceptance_length for step in steps] == LENGTH and len(steps[0].extra) >= 100


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "got columns none"),
        ("time,entropy_nats\n1,2\n", "expected one named step"),
        ("step,entropy_nats\nfirst,2\n", r":2: got step 'first'"),
        ("step,entropy_nats,acceptance_length\n1,many,2\n", "step 1: entropy_nats: got 'many'"),
        ("step,entropy_nats\n1,0.2\n", "1 steps without acceptance_length"),
        ("step,entropy_nats,num_drafts,accepted_1\n1,0.2,10,11\n", "expected no rise"),
    ],
)
def test_source_that_cannot_be_used_is_refused_by_name(tmp_path, content, expected):
    path = tmp_path / "run.csv"
    path.write_text(content)
    with pytest.raises(BadInput, match=expected):
        imported(path)


def test_command_imports_reports_replays_and_watches(tmp_path, capsys):
    source, run_dir = verl_console(tmp_path / "a log [1].txt"), tmp_path / "imported"
    settings = ["num_speculative_tokens=3", "temperature=0.7"]
    assert cli.main(["monitor", "import", str(source), f"run_dir={run_dir}", *settings]) == 0
    printed = capsys.readouterr().out
    assert "verl console, 9 steps" in printed and "8 of 9 steps have both" in printed
    assert printed.splitlines()[-1] == str(run_dir)
    (last,) = read_steps(run_dir)[-1:]
    assert (last.step, last.temperature, last.num_speculative_tokens) == (8, 0.7, 3)

    assert cli.main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert "mean of requests" in page and page.count("<figure>") >= 2

    assert cli.main(["monitor", "replay", str(run_dir)]) == 0
    assert "undetermined" in capsys.readouterr().out

    assert cli.main(["monitor", "watch", str(run_dir)]) == 0  # finished: it ends by itself
    watched = capsys.readouterr().out
    assert "9 steps, finished" in watched and "tokens per nat" in watched and "\x1b" not in watched


def test_command_without_its_input_says_what_to_give(tmp_path, capsys):
    assert cli.main(["monitor", "import"]) == 2
    assert "source: missing; give monitor import <path>" in capsys.readouterr().err
    assert cli.main(["monitor", "watch", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
