"""Rewards in a box: a verifier reads the model's text in a process without rights.

Some verifiers evaluate the answer as code, and some never return on odd answers. So each response is scored in its own
process, forked from a helper that has already imported the verifier:

- limits on time, memory, open files and file sizes (`resource`);
- no network (a network namespace) and no file outside the Python installation (Landlock), if the kernel has them;
- no file opened for writing, no new process, no socket, no ctypes: Python's audit hook, on every machine;
- standard input, output and error are closed; no shell is involved.

Any failure scores 0 and is counted by kind (`FAILURES`).
"""

from bebop.verifiers.box import FAILURES, TASKS_FUNCTION, Verdict, VerifierBox

__all__ = ["FAILURES", "TASKS_FUNCTION", "Verdict", "VerifierBox"]
