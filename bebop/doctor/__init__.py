"""doctor: lists what is installed, and tests whether the installed engine samples from the policy's distribution.

The distribution of a policy with a tiny vocabulary is enumerated in float64. The real engine samples it with
speculation, and a chi-square test compares both. Then the weights are updated in the running engine, and the samples
must follow the new policy.

With a model, that policy is checked instead: the log-probabilities of all its readers on one text (readers.py).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bebop.config import DoctorConfig
from bebop.doctor.checks import Row, check_engine, check_rule
from bebop.doctor.readers import LENGTH, check_readers
from bebop.engines.vllm_engine.environment import applied
from bebop.engines.vllm_engine.fixes import FIXES_ENV
from bebop.store.environment import installed


def run(config: DoctorConfig, run_dir: Path) -> int:
    """Print the table, write summary.json into run_dir; returns 0 if every check passed, else 1."""
    from bebop.monitor import write_summary

    started = time.monotonic()
    print("Installed")
    for name, found in installed():
        print(f"  {name:<14}{found}")
    good, bad = "this engine is lossless", "NOT proven lossless"
    if config.model.name != "none":
        good, bad = "every reader reads the same policy", "readers DIFFER"
        print(f"\nReaders of the policy, {LENGTH} tokens in float32", flush=True)
    else:
        print(f"\nLossless speculation, {config.doctor.num_requests} requests per check", flush=True)
    rows: list[Row] = []
    switch = {FIXES_ENV: os.environ.get(FIXES_ENV, "1") if config.doctor.engine_fixes else "0"}
    with applied(switch), tempfile.TemporaryDirectory() as work_dir:
        for row in _checks(config, Path(work_dir)):
            rows.append(row)
            verdict = {True: "pass", False: "FAIL", None: "----"}[row.passed]
            print(f"  {verdict}  {row.check}: {row.found}; expected {row.expected}", flush=True)
    failed = [row.check for row in rows if row.passed is False]
    seconds = time.monotonic() - started
    verdict = good if not failed else f"{bad}: {', '.join(failed)}"
    print(f"\n{verdict} ({seconds:.0f} s)")
    write_summary(
        run_dir,
        {
            "passed": not failed,
            "failed": failed,
            "checks": [vars(row) for row in rows],
            "installed": dict(installed()),
            "elapsed_s": seconds,
        },
    )
    return 1 if failed else 0


def _checks(config: DoctorConfig, work_dir: Path) -> Iterator[Row]:
    if config.model.name == "none":
        yield from check_rule(config.seed)
        yield from check_engine(config, work_dir)
        return
    from bebop.policies import prepare_policy

    model = config.model.model_copy(update={"dtype": "float32"})
    policy = prepare_policy(model, config.seed, max_model_len=LENGTH)
    yield from check_readers(model.path or policy, policy, config.doctor.max_logprob_diff)
