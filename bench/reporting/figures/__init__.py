"""One file per figure. Each has `select` (table -> the small tidy table the figure shows) and `section` (draws it)."""

from bench.reporting.figures import memory, oom_map, paper, scaling, spread, throughput

FIGURES = (paper, throughput, memory, oom_map, spread, scaling)
"""The figures of a report, in the order of the page."""

__all__ = ["FIGURES"]
