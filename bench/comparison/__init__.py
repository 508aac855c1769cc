"""Regressions: two sets of rows compared, levels that change over commits, and how sure either is.

Pure functions on records, whatever reads or shows them; `interleaved_runs` makes the runs of two versions of the code.
"""

from bench.comparison.comparing import compare_records
from bench.comparison.history import ChangePoint, HistoryPoint, HistorySeries, build_histories
from bench.comparison.hosts import EnvironmentDifference
from bench.comparison.result import (
    CANNOT_TELL,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    ComparedConfiguration,
    ComparisonSettings,
    OverallComparison,
    QuantityChange,
    RunComparison,
    UnmatchedConfiguration,
)
from bench.comparison.timing import compute_detectable_change, compute_detection_probability

__all__ = [
    "CANNOT_TELL",
    "IMPROVEMENT",
    "NO_CHANGE",
    "REGRESSION",
    "ChangePoint",
    "ComparedConfiguration",
    "ComparisonSettings",
    "EnvironmentDifference",
    "HistoryPoint",
    "HistorySeries",
    "OverallComparison",
    "QuantityChange",
    "RunComparison",
    "UnmatchedConfiguration",
    "build_histories",
    "compare_records",
    "compute_detectable_change",
    "compute_detection_probability",
]
