"""Rewards in a box: what an answer may do, what a failure scores, and what survives it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bebop.config import Task
from bebop.data.prompts import make_prompts
from bebop.data.tasks import pack, score
from bebop.errors import VerifierError
from bebop.verifiers import TASKS_FUNCTION, VerifierBox

ODD = (
    "9**9**9", "exit()", "(" * 5000, "[" * 5000 + "]" * 5000, "nan", "1e999", "x" * 1_000_000, "\udcff\ud800", "\x00",
    "None", "{}", "1/0", "\\", "%s%s", "'a'*10**9", "(lambda f: f(f))(lambda f: f(f))", "__import__('os')._exit(0)",
    "[x for x in ().__class__.__base__.__subclasses__()]",
)  # fmt: skip
EVALUATING = ("countdown", "puzzle24")  # verifiers that evaluate the answer as an expression


@pytest.fixture(scope="module")
def box():
    with VerifierBox(TASKS_FUNCTION, timeout_s=2.0, bounds=(0.0, 1.0)) as made:
        yield made


def judge(box: VerifierBox, prompt, answer: str):
    return box.score(data_source=prompt.task, solution_str=f"Answer: {answer}", ground_truth=pack(prompt))


def prompt_of(task: str):
    return make_prompts([Task(name=task)], 1, 0, "rl")[0]


def test_scores_are_those_of_the_verifier(box):
    for prompt in make_prompts([Task(name="chain_sum"), Task(name="simple_equations")], 6, 0, "rl"):
        for answer in (prompt.entry["answer"], "17", "-999999"):
            verdict = judge(box, prompt, answer)
            assert verdict.failure is None and verdict.score == score(prompt, f"Answer: {answer}")


@pytest.mark.parametrize("task", EVALUATING)
def test_code_in_an_answer_touches_nothing(box, task, tmp_path):
    target = tmp_path / "written"
    for call in (f"__import__('os').system('touch {target}')", f"open('{target}', 'w')", "open('/etc/passwd').read()"):
        assert judge(box, prompt_of(task), call).score == 0.0
    assert not target.exists()


@pytest.mark.parametrize("task", (*EVALUATING, "prime_factorization", "coin_flip", "game_of_life", "boxnet"))
def test_odd_answers_score_and_the_box_continues(box, task):
    prompt = prompt_of(task)
    before = box.num_scored
    pending = [box.submit(data_source=task, solution_str=f"Answer: {odd}", ground_truth=pack(prompt)) for odd in ODD]
    for future in pending:
        verdict = future.result(timeout=60)
        assert 0.0 <= verdict.score <= 1.0 and (verdict.failure is None or verdict.score == 0.0)
    assert box.num_scored == before + len(ODD)
    first = prompt_of("chain_sum")
    assert judge(box, first, first.entry["answer"]).score == 1.0


FUNCTIONS = """
import os, socket, subprocess, time
seen = []
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    seen.append(1)
    return eval(solution_str)
async def later(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": eval(solution_str), "more": 1}
def loud(data_source, solution_str, ground_truth, extra_info=None):
    try:
        exec(solution_str)
    except Exception:
        pass
    return {"score": 1.0}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own reward") / "my reward.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def own(file):
    with VerifierBox(f"{file}:compute_score", timeout_s=1.0, memory_mib=256) as made:
        yield made


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("time.sleep(60)", "timeout"),
        ("'a' * 10**10", "memory"),
        ("[0] * 10**9", "memory"),
        ("os._exit(3)", "died"),
        ("exit()", "exception"),
        ("float('nan')", "value"),
        ("1 / 0", "exception"),
        ("open('/etc/passwd').read()", "forbidden"),
        ("subprocess.run(['true']).returncode", "forbidden"),
        ("os.fork()", "forbidden"),
        ("socket.create_connection(('127.0.0.1', 80))", "forbidden"),
        ("__import__('ctypes').CDLL(None).getpid()", "forbidden"),
    ],
)
def test_each_kind_of_failure_scores_0_and_is_counted(own, answer, kind):
    before = own.failures[kind]
    verdict = own.score(data_source="own", solution_str=answer, ground_truth="")
    assert (verdict.score, verdict.failure) == (0.0, kind), verdict
    assert own.failures[kind] == before + 1


def test_no_answer_changes_how_the_next_one_is_scored(own):
    for _ in range(3):
        assert own.score(data_source="own", solution_str="len(seen)", ground_truth="").score == 1.0


def test_a_forbidden_act_counts_though_the_verifier_hides_it(file, tmp_path):
    with VerifierBox(f"{file}:loud", timeout_s=5.0) as box:
        verdict = box.score(data_source="own", solution_str=f"open('{tmp_path}/x', 'w')", ground_truth="")
        assert (verdict.score, verdict.failure) == (0.0, "forbidden") and not (tmp_path / "x").exists()


def test_network_is_out_of_reach_unless_asked_for(file):
    listener = socket.create_server(("127.0.0.1", 0))
    call = f"socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 1) and 1.0"
    with listener, VerifierBox(f"{file}:compute_score", sealed=False, timeout_s=5.0) as open_box:
        assert open_box.score(data_source="own", solution_str=call, ground_truth="").score == 1.0
        assert open_box.score(data_source="own", solution_str="time.sleep(60)", ground_truth="").failure == "timeout"


def test_the_helper_comes_back_after_it_was_killed(file):
    with VerifierBox(f"{file}:compute_score", timeout_s=5.0) as box:
        assert box.score(data_source="own", solution_str="0.5", ground_truth="").score == 0.5
        waiting = box.submit(data_source="own", solution_str="time.sleep(3)", ground_truth="")
        box._helper.kill()
        assert waiting.result(timeout=30).failure == "died"
        assert box.score(data_source="own", solution_str="0.25", ground_truth="").score == 0.25
        assert box.counts()["restarts"] == 1.0


def test_missing_reward_function_is_refused_in_one_line(tmp_path):
    with (
        VerifierBox(f"{tmp_path}/none.py:compute_score") as box,
        pytest.raises(VerifierError, match=r"none\.py") as error,
    ):
        box.score(data_source="own", solution_str="", ground_truth="")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sealed", [True, False])
def test_an_async_function_scores_too(file, sealed):
    with VerifierBox(f"{file}:later", sealed=sealed) as box:
        assert box.score(data_source="own", solution_str="0.75", ground_truth="").score == 0.75
