"""record_engine_drafts.py for several policies, one after another in one process: vLLM is imported once.

A script that test_families_engine.py starts. usage: record_family_drafts.py FOLDER ROUNDS.json POLICY_NAME...; the
policies lie in FOLDER, and FOLDER/NAME.pt takes the records of FOLDER/NAME, or FOLDER/NAME.txt why there are none.
"""

from __future__ import annotations

import gc
import sys
import traceback
from pathlib import Path

from record_engine_drafts import main as record


def main(folder: str, rounds_file: str, *names: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    for name in names:
        policy = Path(folder) / name
        try:
            record(str(policy), rounds_file, str(policy.with_suffix(".pt")), "1.0", "0.0")
        except Exception:
            policy.with_suffix(".txt").write_text(traceback.format_exc())
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(*sys.argv[1:])
