"""GRPO on the real verl and the real vLLM: both modes, kill -9 and resume, a killed engine. Three start-ups in all."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from grpo_runs import check_served, config, finish, listening, no_process_left, start, wait_for_step

from bebop.monitor import read_steps
from bebop.policies import random_checkpoint
from bebop.processes import marked
from bebop.rl import checkpoints

pytestmark = pytest.mark.e2e


def trained_prompts(run_dir: Path) -> list[list[str]]:
    lines = (run_dir / "trained_prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_ids"] for line in lines]


def check_records(run_dir: Path, steps: int) -> None:
    records = read_steps(run_dir)
    check_served(records, steps)
    for record in records:
        assert record.entropy_nats > 0
        assert record.reward_mean is not None and 0 <= record.zero_spread_groups <= 1
        assert len(record.counts.accepted_per_depth) == 3 and record.acceptance_length < 4
        assert 0 <= record.staleness_mean <= record.staleness_max
        assert record.tokens_per_s > 0 and record.step_s > 0 and record.response_length_mean > 0
        assert "rollout/spec_accept_rate" in record.extra and "rollout/spec_accept_length" in record.extra


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run of 6 steps that was killed with -9 after its third, and run again to its end.

    Of a policy with padding ids, which trainer and engine must leave out alike.
    """
    run_dir = tmp_path_factory.mktemp("async") / "run"
    policy = random_checkpoint(run_dir.with_name("policy"), padding=64)
    values = config("colocate_async", steps=6, save_every=2)
    first = start(values, run_dir, policy)
    wait_for_step(first, run_dir, 3)
    (run_dir / "listening.json").write_text(json.dumps(sorted(listening(run_dir))))
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert no_process_left(run_dir, within_s=20), "the kernel ends a killed run's processes"
    assert checkpoints.latest(run_dir) == 2
    second = start(values, run_dir, policy)
    finish(second)
    assert not marked(run_dir)
    return run_dir


@pytest.mark.timeout(900)
def test_async_run_is_logged_whole_and_serves_the_trainers_heads(killed_and_resumed: Path):
    check_records(killed_and_resumed, steps=6)
    records = read_steps(killed_and_resumed)
    assert records[0].probs_diff_max is not None  # everything is on-policy there
    assert max(record.staleness_max for record in records) == 1


def test_nothing_of_a_run_listens_on_another_interface(killed_and_resumed: Path):
    sockets = json.loads((killed_and_resumed / "listening.json").read_text())
    assert sockets and all(address.removeprefix("::ffff:").startswith("127.") for _, address in sockets), sockets


def test_killed_run_repeats_and_skips_no_prompt(killed_and_resumed: Path):
    from bebop.config import Task
    from bebop.data.prompts import make_prompts

    trained = trained_prompts(killed_and_resumed)
    assert [len(prompts) for prompts in trained] == [4] * 6
    wanted = [prompt.prompt_id for prompt in make_prompts([Task(name="chain_sum")], 24, 0, "rl")]
    assert sorted(prompt for prompts in trained for prompt in prompts) == sorted(wanted)


def test_checkpoint_is_a_policy_with_its_heads_that_vllm_loads(killed_and_resumed: Path):
    from bebop.config import RolloutSection
    from bebop.engines import make_engine
    from bebop.mtp import checkpoint_checksums
    from bebop.records import Sampling

    policy = checkpoints.policy_dir(killed_and_resumed, 6)
    last = read_steps(killed_and_resumed)[-1]
    held = checkpoint_checksums(policy)
    assert (held.backbone, held.heads) == (last.backbone_checksum, last.heads_checksum_engine)
    assert held.heads == checkpoint_checksums(killed_and_resumed.with_name("policy")).heads
    rollout = RolloutSection(max_model_len=128, max_num_seqs=4, kv_cache_gib=0.25)
    with make_engine(rollout, policy, seed=0, dtype="float32") as engine:
        (answer,) = engine.generate([[1, 2, 3]], Sampling(max_tokens=8))
        assert len(answer.token_ids) <= 8 and engine.checksums() == held


@pytest.fixture(scope="module")
def engine_killed(tiny_random: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float, int]:
    """A synchronous run whose engine is killed after 4 steps: its folder, output, seconds until it ended, exit code."""
    run_dir = tmp_path_factory.mktemp("sync") / "run"
    process = start(config("sync", steps=500, save_every=500), run_dir, tiny_random)
    wait_for_step(process, run_dir, 4)
    engines = [pid for pid in marked(run_dir) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert engines
    os.kill(engines[0], signal.SIGKILL)
    killed_at = time.monotonic()
    output, _ = process.communicate(timeout=120)
    return run_dir, output, time.monotonic() - killed_at, process.returncode


@pytest.mark.timeout(900)
def test_killed_engine_ends_the_run_within_a_minute(engine_killed: tuple[Path, str, float, int]):
    run_dir, output, seconds, code = engine_killed
    assert code != 0 and seconds < 60
    assert "EngineDeadError" in output or "engine died" in output.lower(), output
    assert no_process_left(run_dir, within_s=0)


def test_sync_steps_are_on_policy_and_logged(engine_killed: tuple[Path, str, float, int]):
    run_dir = engine_killed[0]
    steps = len(read_steps(run_dir))
    check_records(run_dir, steps)
    for record in read_steps(run_dir):
        assert record.staleness_max == 0
        assert record.probs_diff_max <= 1e-5
