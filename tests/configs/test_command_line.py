"""What a user may type, and the one line that answers a slip. Every check runs before any model loads."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import pytest
import torch

from bebop.cli import compose, main
from bebop.config import COMMANDS, check, check_depth
from bebop.config.messages import is_section
from bebop.config.overrides import Arguments, parse
from bebop.errors import BebopError, ConfigError
from bebop.spec.sampling import apply_sampling


def composed(command: str, *words: str) -> dict:
    return compose(command, parse(command, list(words)))


@pytest.mark.parametrize("word", ["sft.lrr=1", "+sft.lrr=1", "++sft.lrr=2"])
def test_unknown_key_names_itself_and_the_nearest(word, capsys):
    assert main(["sft", word]) == 2
    message = capsys.readouterr().err
    assert word in message and "sft.lr?" in message and message.count("\n") == 1


def test_wrong_type_names_key_and_value(capsys):
    assert main(["sft", "sft.lr=abc"]) == 2
    assert "sft.lr: got 'abc', expected a number above 0" in capsys.readouterr().err


def test_checks_survive_python_without_asserts():
    for word in ("sft.lrr=1", "sft.lr=abc"):
        done = subprocess.run(
            [sys.executable, "-O", "-m", "bebop.cli", "sft", word], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and "sft.lr" in done.stderr


@pytest.mark.parametrize("value", ["0", "-1", "1.5"])
def test_draft_length_that_is_no_count_is_rejected(value, capsys):
    assert main(["grpo", f"rollout.num_speculative_tokens={value}"]) == 2
    told = f"rollout.num_speculative_tokens: got {value}, expected an integer of at least 1"
    assert told in capsys.readouterr().err


def test_draft_deeper_than_the_head_names_both_keys(capsys):
    assert main(["sft", "rollout.num_speculative_tokens=4", "sft.depth=3"]) == 2
    message = capsys.readouterr().err
    assert "rollout.num_speculative_tokens: got 4" in message and "sft.depth=3" in message


def test_group_option_that_does_not_exist_names_the_nearest(capsys):
    assert main(["sft", "loss=e2etv"]) == 2
    assert "did you mean e2e_tv?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sft", "grpo", "demo", "eval"])
def test_truncated_training_rollouts_are_refused(command, capsys):
    assert main([command, "rollout.top_p=0.8"]) == 2
    assert "rollout.top_p: got 0.8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "data.source=parquet"], "set data.path=<file>.parquet"),
        (["sft", "data.path=x.parquet"], "data.path: got x.parquet with data.source=self_distill"),
        (["grpo", "data.source=parquet", "data.path=x.parquet"], "data.source: got parquet in grpo"),
        (["bench", "data.source=parquet", "data.path=x.parquet", "bench=rollout"], "data.source: got parquet in bench"),
        (["bench", "bench=rollout", "bench.batch_sizes=[]"], "bench.batch_sizes: got [], expected a list of at"),
        (["bench", "bench=rollout", "bench.batch_sizes=[0]"], "bench.batch_sizes.0: got 0, expected an integer"),
        (["bench", "bench=rollout", "bench.batch_sizes=[8,8]"], "bench.batch_sizes: got [8, 8]"),
        (["bench", "bench=rollout", "rollout.max_num_seqs=4"], "at most rollout.max_num_seqs=4"),
        (["sft", "rollout.temperature=0"], "rollout.temperature: got 0.0 in sft, expected a number above 0"),
        (["sft", "loss.temperature=1.0"], "loss.temperature is no longer a key"),
        (["grpo", "grpo.online_heads=never"], "grpo.online_heads is no longer a key"),
        (["sft", "sft=default"], "sft: got default, expected a key below it, as in sft.depth="),
        (["sft", "data.tasks=[{name: chain_sum, wieght: 2}]"], "did you mean data.tasks.0.weight?"),
        (["report"], "run: missing"),
        (["bench", "bench=tree", "rollout.top_k=5"], "rollout.top_k: got 5 in bench tree"),
    ],
)
def test_what_would_be_ignored_is_refused_in_one_line(words, message, capsys):
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_a_refusal_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    assert main(["sft", "model=hf", f"model.path={tmp_path}", f"run_dir={tmp_path / 'run'}"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("bebop: error: ") and "gpt2" in told and told.count("\n") == 1

    with pytest.raises(BebopError):
        check_depth(composed_rollout(), 1, "sft.depth")
    with pytest.raises(BebopError):
        apply_sampling(torch.zeros(2, 4), temperature=-1.0)


def test_a_fault_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(config, run_dir):
        raise ValueError("not a refusal")

    monkeypatch.setattr("bebop.doctor.run", broken)
    with pytest.raises(ValueError, match="not a refusal"):
        main(["doctor", f"run_dir={tmp_path / 'run'}"])


def composed_rollout():
    return check("sft", composed("sft")).rollout


def test_async_without_a_correction_is_refused(capsys):
    assert main(["grpo", "trainer=colocate_async", "trainer.importance_correction=none"]) == 2
    assert "trainer.importance_correction: got none" in capsys.readouterr().err


def test_kernel_missing_for_the_loss_is_refused_before_loading(capsys):
    assert main(["sft", "loss=hard_ce", "loss.impl=cpu"]) == 2
    assert "loss.impl: got cpu with loss.name=hard_ce" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", ["runs/a=b", "runs/with space", "runs/a,b", "runs/it's", "runs/(x)[y]{z}", "runs/back\\slash"]
)
def test_paths_pass_through_untouched(path):
    assert composed("sft", f"run_dir={path}")["run_dir"] == path


def test_verl_keys_are_passed_on_as_verl_spells_them():
    values = composed("grpo", "verl.trainer.val_before_train=True", "actor_rollout_ref.actor.optim.lr=1e-5")
    assert values["grpo"]["verl_overrides"] == [
        "trainer.val_before_train=True",
        "actor_rollout_ref.actor.optim.lr=1e-5",
    ]
    with pytest.raises(ConfigError, match="verl"):
        parse("sft", ["verl.trainer.val_before_train=True"])


def test_show_and_dry_run_print_the_config_and_run_nothing(capsys, tmp_path):
    for flag in (["--cfg", "job"], ["--dry-run"]):
        assert main(["sft", "sft.steps=7", f"run_dir={tmp_path / 'run'}", *flag]) == 0
        assert "steps: 7" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_keys_in_no_file_can_be_set_and_swept():
    values = composed("sft", "sft.lr=0.5", "+rollout.top_k=0", "++seed=${sft.grad_accum}", "recipe=losses")
    assert values["sft"]["lr"] == 0.5 and values["seed"] == 1
    assert values["rollout"]["temperature"] == 0.7 and values["rollout"]["tree_budget"] == 16


def test_multirun_expands_every_combination(capsys):
    assert main(["sft", "-m", "loss=hard_ce,e2e_tv", "sft.depth=3,4", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("# loss=") == 4 and "# loss=hard_ce sft.depth=4" in out


def test_sweep_job_reads_its_overrides_unchanged():
    words = parse("sft", ["recipe=sft", "sft.depth=4", "run_dir=runs/a b"]).overrides
    assert parse("sft", words).overrides == words


def test_run_folder_of_another_run_is_refused(capsys, tmp_path):
    from bebop.monitor import write_run_json

    values = check("sft", composed("sft", f"run_dir={tmp_path}")).model_dump(mode="json")
    write_run_json(tmp_path, "sft", values)
    (tmp_path / "metrics.jsonl").touch()
    assert main(["sft", f"run_dir={tmp_path}", "sft.lr=0.5"]) == 2
    assert "sft.lr=0.5" in capsys.readouterr().err
    assert main(["grpo", f"run_dir={tmp_path}"]) == 2
    assert "`sft`" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes_and_passes_its_schema(command):
    needed = {"report": ["run=a"], "monitor": ["action=watch", "run=a"]}
    check(command, compose(command, Arguments(needed.get(command, []))))


def _numeric_keys(section, prefix=""):
    """Every dotted key that takes a number, alone or in a list."""
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield from _numeric_keys(field.annotation, f"{prefix}{name}.")
        elif re.search(r"\b(int|float)\b", str(field.annotation)) and "dict" not in str(field.annotation):
            yield prefix + name, "list[" in str(field.annotation)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("report", "monitor")])
def test_number_too_large_for_libraries_is_refused_by_key(command):
    model, values = COMMANDS[command], composed(command)
    for key, listed in _numeric_keys(model):
        for odd in (float("nan"), float("inf"), -float("inf"), 10**39, 10**400, -(10**39)):
            changed = copy.deepcopy(values)
            *path, last = key.split(".")
            section = changed
            for part in path:
                section = section[part]
            section[last] = [odd] if listed else odd
            with pytest.raises(ConfigError) as caught:
                check(command, changed)
            assert str(caught.value).startswith(key.split(".")[0]) and "\n" not in str(caught.value), (key, odd)
            assert last in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.parametrize("value", ["9" * 5000, "1e400", ".nan", "1" + "0" * 30])
def test_impossible_number_is_refused_in_one_line(value, capsys):
    assert main(["sft", f"sft.steps={value}", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sft", "data.max_response_tokens=400"],
            "128 + 400: got 528 tokens, expected at most rollout.max_model_len",
        ),
        (
            ["eval", "data.max_prompt_tokens=400"],
            "400 + 224: got 624 tokens, expected at most rollout.max_model_len",
        ),
        (["bench", "bench=rollout", "data.max_prompt_tokens=600"], "expected at most rollout.max_model_len=512"),
        (["grpo", "data.max_prompt_tokens=600"], "expected at most rollout.max_model_len=512"),
        (["eval", "rollout.temperature=0.001"], "rollout.temperature: got 0.001 with vLLM, which samples at 0.01"),
        (["eval", "temperatures=[1.0,0.005]"], "temperatures: got 0.005 with vLLM"),
        (["doctor", "doctor.temperatures=[0.002]"], "doctor.temperatures: got 0.002 with vLLM"),
        (["sft", "logger.project=a/b"], "logger.project: got 'a/b' (3 characters), expected 1 to 128 characters"),
        (["sft", f"logger.name={'n' * 129}"], "(129 characters), expected 1 to 128 characters"),
        (["grpo", "rollout.kv_cache_gib=1e9"], "rollout.kv_cache_gib: got 1000000000.0, expected a number"),
        (["grpo", "grpo.watchdog_s=1e300"], "grpo.watchdog_s: got 1e+300, expected a number"),
    ],
)
def test_limits_of_the_libraries_are_checked_with_the_config(words, message, capsys):
    assert main([*words, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_folder_with_an_equals_sign_needs_no_key():
    for folder in ("runs/a=b", "/a=b [c]/run", "./é='x'"):
        assert parse("report", [folder]).overrides == parse("report", [f"run={folder}"]).overrides
    with pytest.raises(ConfigError, match="rnu"):
        parse("report", ["rnu=x"])
