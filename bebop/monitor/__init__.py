"""Statistics of a run's records, and the decision on online updates. A finished run can be analysed again."""

from bebop.errors import LoggerError
from bebop.monitor.decision import Decision, MonitorState, decide
from bebop.monitor.decomposition import (
    Decomposition,
    Definition,
    Estimate,
    decompose,
    slope_of,
    split_by_definition,
)
from bebop.monitor.report import write_report
from bebop.monitor.slope import Slope, fit_slope
from bebop.monitor.summary import state_of, summarise
from bebop.store.metrics import JsonlSink, read_records, read_steps, step_from_json, step_to_json
from bebop.store.run_folder import write_run_json, write_summary
from bebop.store.tables import format_table, print_table
from bebop.store.wandb import WandbSink, check_wandb

__all__ = [
    "Decision",
    "Decomposition",
    "Definition",
    "Estimate",
    "JsonlSink",
    "LoggerError",
    "MonitorState",
    "Slope",
    "WandbSink",
    "check_wandb",
    "decide",
    "decompose",
    "fit_slope",
    "format_table",
    "print_table",
    "read_records",
    "read_steps",
    "slope_of",
    "split_by_definition",
    "state_of",
    "step_from_json",
    "step_to_json",
    "summarise",
    "write_report",
    "write_run_json",
    "write_summary",
]
