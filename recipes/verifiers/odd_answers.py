"""Odd answers to every task of reasoning-gym, scored in the box: `python odd_answers.py [task ...]` prints a table.

For each task: the score of its own right answer, how many odd answers were scored, how many failed and of which kind,
and the slowest. Exit code 1 if an answer wrote, opened or connected anything, took 5 s, or got a score outside [0, 1].
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bebop.config import Task
from bebop.data.prompts import make_prompts
from bebop.data.tasks import pack
from bebop.verifiers import TASKS_FUNCTION, Verdict, VerifierBox

LIMIT_S = 5.0


def odd_answers(target: Path, port: int) -> dict[str, str]:
    """name -> answer. target: a file that some of them try to write; port: on 127.0.0.1, which some try to reach."""
    write = f"open({str(target)!r}, 'w').write('x')"
    shell = f"__import__('os').system('touch {target}')"
    return {
        "shell": f"[{shell}]",
        "shell, bare": shell,
        "write": write,
        "write, hidden": f"__import__('_io').FileIO('{target}', 'w')",
        "write through exec": f"exec({write!r})",
        "process": f"__import__('subprocess').run(['touch', '{target}'])",
        "process, below subprocess": f"__import__('os').execv('/usr/bin/touch', ['touch', '{target}'])",
        "fork bomb": "[__import__('os').fork() for _ in range(10**6)]",
        "fork bomb, shell": ":(){ :|:& };:",
        "threads": "[__import__('_thread').start_new_thread(__import__('time').sleep, (60,)) for _ in range(9999)]",
        "connection": f"__import__('socket').create_connection(('127.0.0.1', {port}))",
        "listener": "__import__('socket').create_server(('127.0.0.1', 0))",
        "password file": "open('/etc/passwd').read()",
        "kill": "__import__('os').kill(__import__('os').getppid(), 9)",
        "exit": "exit()",
        "exit at once": "__import__('os')._exit(0)",
        "power": "9**9**9",
        "power of powers": "9**9**9**9",
        "shift": "1<<10**12",
        "factorial": "factorial(10**7)",
        "memory": "'a'*10**11",
        "memory in lists": "[[0]*10**7]*10**7",
        "sleep": "__import__('time').sleep(60)",
        "endless": "(lambda f: f(f))(lambda f: f(f))",
        "division by zero": "1/0",
        "round brackets": "(" * 20_000 + "1" + ")" * 20_000,
        "square brackets": "[" * 20_000 + "]" * 20_000,
        "curly brackets": '{"a":' * 20_000 + "1" + "}" * 20_000,
        "signs": "-" * 50_000 + "1",
        "sum": "1+" * 50_000 + "1",
        "nan": "nan",
        "infinity": "-inf",
        "huge float": "1e999",
        "long integer": "9" * 100_000,
        "digits of other scripts": "\u0661\u0662\u00bd\u2167",
        "none": "None",
        "empty": " ",
        "empty list": "[]",
        "empty mapping": "{}",
        "list of none": "[None, None]",
        "nested lists": "[[1], [[2]], []]",
        "booleans": "True False",
        "megabytes": "x" * 3_000_000,
        "megabytes of numbers": "1 2 " * 500_000,
        "megabytes of commas": "," * 2_000_000,
        "megabytes of lines": "\n" * 2_000_000,
        "NUL bytes": "\x00" * 50,
        "control characters": "\x1b[2J\x07\x08\x7f\x85\u2028",
        "lone surrogates": "\udcff\ud800",
        "combining characters": "a" + "\u0301" * 10_000,
        "right to left": "\u202e\u2066 12",
        "backslashes": "\\" * 1001,
        "format": "%s%n{0.__class__}{",
        "quotes": "'\"'''\"\"\"",
        "regular expression": "(a+)+$" + "a" * 60,
        "path": "../../../../etc/passwd",
        "YAML": "!!python/object/apply:os.system ['true']",
        "pickle": "cos\nsystem\n(S'true'\ntR.",
        "markup": "<![CDATA[<!ENTITY a SYSTEM 'file:///etc/passwd'>]]>",
        "answer in answers": "Answer: " * 10_000,
    }  # fmt: skip


@dataclass
class Row:
    """What one task made of the answers."""

    task: str
    right: Verdict
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Answers whose verdict breaks a promise of the box."""
        found = []
        for name, verdict in self.verdicts.items():
            if not 0.0 <= verdict.score <= 1.0 or (verdict.failure and verdict.score):
                found.append(f"{self.task}, {name}: {verdict}")
        return found

    def slow(self) -> list[str]:
        """Answers that took too long."""
        return [f"{self.task}, {name}: {taken:.1f} s" for name, taken in self.seconds.items() if taken >= LIMIT_S]

    def line(self) -> str:
        failed = Counter(verdict.failure for verdict in self.verdicts.values() if verdict.failure)
        kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(failed.items())) or "none"
        right = f"{self.right.score:g}" if self.right.failure is None else self.right.failure
        slowest = max(self.seconds, key=self.seconds.__getitem__)
        return f"| {self.task} | {right} | {len(self.verdicts)} | {kinds} | {self.seconds[slowest]:.1f} ({slowest}) |"


HEAD = """| task | score of the right answer | odd answers | failed | slowest, seconds |
|---|---|---|---|---|"""


def judge(box: VerifierBox, task: str, answers: Mapping[str, str], *, at_once: int = 2) -> Row:
    """Score the right answer to a prompt of the task, which also makes its data set, then the odd ones."""
    (prompt,) = make_prompts([Task(name=task)], 1, 0, "rl", solutions=False)
    truth = pack(prompt)

    def score(answer: object) -> tuple[Verdict, float]:
        start = time.monotonic()
        verdict = box.score(data_source=task, solution_str=f"Answer: {answer}", ground_truth=truth)
        return verdict, time.monotonic() - start

    row = Row(task, score(prompt.entry["answer"])[0])
    with ThreadPoolExecutor(at_once) as pool:
        for name, (verdict, seconds) in zip(answers, pool.map(score, answers.values()), strict=True):
            row.verdicts[name], row.seconds[name] = verdict, seconds
    return row


class Bait:
    """A file that nobody may write and a port that nobody may reach, with the state of this process before it all."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bait-")
        self.target = Path(self._folder.name) / "written"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._before = self._state()

    @staticmethod
    def _state() -> dict[str, object]:
        return {
            "folder": os.getcwd(),
            "environment": {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")},
            "limits": sys.getrecursionlimit(),
        }

    def faults(self) -> list[str]:
        """What was taken, since the start."""
        found = ["a file was written"] if self.target.exists() else []
        try:
            self._listener.accept()
            found.append("a connection was opened")
        except BlockingIOError:
            pass
        return found + [
            f"this process's {name} changed" for name, was in self._before.items() if self._state()[name] != was
        ]

    def close(self) -> None:
        self._listener.close()
        self._folder.cleanup()


def main(tasks: Sequence[str]) -> int:
    from reasoning_gym.factory import DATASETS

    bait, faults, total = Bait(), [], Counter()
    print(HEAD, flush=True)
    with VerifierBox(TASKS_FUNCTION, at_once=2, bounds=(0.0, 1.0)) as box:
        for task in tasks or sorted(DATASETS):
            try:
                row = judge(box, task, odd_answers(bait.target, bait.port))
            except ValueError as error:  # not a task that data.tasks accepts
                print(f"| {task} | refused: {error} | | | |", flush=True)
                continue
            print(row.line(), flush=True)
            faults += row.faults() + row.slow()
            total["tasks"] += 1
        counts = box.counts()
    faults += bait.faults()
    bait.close()
    print(f"\n{total['tasks']} tasks; " + ", ".join(f"{name} {number:.0f}" for name, number in counts.items()))
    print(*(f"FAULT {fault}" for fault in faults), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
