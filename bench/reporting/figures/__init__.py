"""One file per figure. Each has `select` (table -> the small tidy table the figure shows) and `build_section` (draws
it)."""

from bench.reporting.figures import (
    agreement,
    communication,
    frontier,
    idle,
    memory,
    oom_map,
    paper,
    scaling,
    sharding_factor,
    spread,
    throughput,
    trade,
)

FIGURE_MODULES = (
    *(paper, throughput, memory, trade, frontier, oom_map, sharding_factor),
    *(communication, idle, spread, scaling, agreement),
)
"""The figures of a report, in the order of the page."""

MODULES_SHOWING_ALL_TRIALS = (frontier, oom_map)
"""Those that show all that a search for the largest batch tried; the others are given its end."""

__all__ = ["FIGURE_MODULES", "MODULES_SHOWING_ALL_TRIALS"]
