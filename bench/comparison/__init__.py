"""Regressions: two sets of rows compared, levels that change over commits, and how sure either is.

Pure functions on records, whatever reads or shows them.
"""

from bench.comparison.comparing import compare
from bench.comparison.detectable import detectable_change, detection_probability
from bench.comparison.history import ChangePoint, Point, Series, history
from bench.comparison.machines import Difference
from bench.comparison.result import Change, Comparison, Overall, Row, Unmatched
from bench.comparison.settings import Settings
from bench.comparison.words import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION

__all__ = [
    "CANNOT_TELL",
    "IMPROVEMENT",
    "NO_CHANGE",
    "REGRESSION",
    "Change",
    "ChangePoint",
    "Comparison",
    "Difference",
    "Overall",
    "Point",
    "Row",
    "Series",
    "Settings",
    "Unmatched",
    "compare",
    "detectable_change",
    "detection_probability",
    "history",
]
