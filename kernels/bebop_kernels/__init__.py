"""Kernels for total-variation losses: the overlap sum_v min(p_v, q_v) of two token distributions; and the search for
the highest logits, to which draft trees are confined. torch and triton only, and triton only where it runs.

`naive` holds the formulas in their plainest form; `dispatch` says which implementation computes what.
"""

from bebop_kernels import naive
from bebop_kernels.highest import highest
from bebop_kernels.linear_overlap import linear_tv_overlap
from bebop_kernels.linear_rows import linear_rows
from bebop_kernels.overlap import tv_overlap
from bebop_kernels.reference_overlap import overlap_rows
from bebop_kernels.rows import Rows
from bebop_kernels.skipping import tv_overlap_skipping
from bebop_kernels.statistics import TvStatistics, tv_statistics
from bebop_kernels.topk import tv_overlap_topk

__all__ = [
    "Rows",
    "TvStatistics",
    "highest",
    "linear_rows",
    "linear_tv_overlap",
    "naive",
    "overlap_rows",
    "tv_overlap",
    "tv_overlap_skipping",
    "tv_overlap_topk",
    "tv_statistics",
]
