"""What the command passes to its training processes."""

from __future__ import annotations

from bebop.config import FilePath, Section, SftConfig


class Job(Section):
    # the command's config
    config: SftConfig
    # policy whose heads are trained
    policy_dir: FilePath
    # text set, see bebop.data.self_distill
    text_dir: FilePath
    # folder of the run
    run_dir: FilePath
