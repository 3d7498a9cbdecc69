"""Verifiers run in a thread pool, and the first threads to come import reasoning-gym together."""

import subprocess
import sys

SCRIPT = """
import threading, time
from bebop.config import Task
from bebop.data import make_prompts
faults = []
def first_use():
    try:
        make_prompts([Task(name="chain_sum")], 1, 0, "rl")
    except Exception as error:
        faults.append(error)
threads = [threading.Thread(target=first_use) for _ in range(12)]
for thread in threads:
    thread.start()
    time.sleep(0.05)  # the later ones arrive while the first is still importing
for thread in threads:
    thread.join()
raise SystemExit(str(faults[0]) if faults else 0)
"""


def test_threads_that_arrive_during_the_import_find_every_task():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
