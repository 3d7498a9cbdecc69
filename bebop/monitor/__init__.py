"""Watches a run: what it wrote down, and what follows from it. Reads records only, so that a finished run can be replayed."""

from bebop.monitor.store import (
    JsonlSink,
    read_records,
    read_steps,
    step_from_json,
    step_to_json,
    write_run_json,
    write_summary,
)

__all__ = [
    "JsonlSink",
    "read_records",
    "read_steps",
    "step_from_json",
    "step_to_json",
    "write_run_json",
    "write_summary",
]
