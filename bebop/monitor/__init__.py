"""Watches a run: its records, and what follows from them. Reads records only, so a finished run can be replayed."""

from bebop.monitor.decision import Decision, MonitorState, decide
from bebop.monitor.decomposition import (
    Decomposition,
    Definition,
    Estimate,
    decompose,
    slope_of,
    split_by_definition,
)
from bebop.monitor.slope import Slope, fit_slope
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
    "Decision",
    "Decomposition",
    "Definition",
    "Estimate",
    "JsonlSink",
    "MonitorState",
    "Slope",
    "decide",
    "decompose",
    "fit_slope",
    "read_records",
    "read_steps",
    "slope_of",
    "split_by_definition",
    "step_from_json",
    "step_to_json",
    "write_run_json",
    "write_summary",
]
