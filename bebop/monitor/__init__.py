"""Watches a run: its records, and what follows from them. Reads records only, so a finished run can be replayed."""

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
