"""Kernels for total-variation losses: the overlap sum_v min(p_v, q_v) of two token distributions, its gradient, and
top-k with stable ties for draft trees. Needs torch; triton and numba only where their implementation runs.

One folder per op. Start with its `naive.py`, the formula in a few lines; `dispatch` says which implementation runs.
"""

from bebop_kernels.linear import linear_tv_overlap
from bebop_kernels.linear.rows import linear_rows
from bebop_kernels.overlap import tv_overlap
from bebop_kernels.overlap.reference import overlap_rows
from bebop_kernels.rows import Rows
from bebop_kernels.statistics import TvStatistics, tv_statistics
from bebop_kernels.topk import topk

__all__ = [
    "Rows",
    "TvStatistics",
    "linear_rows",
    "linear_tv_overlap",
    "overlap_rows",
    "topk",
    "tv_overlap",
    "tv_statistics",
]
