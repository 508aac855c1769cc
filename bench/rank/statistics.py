"""Statistics of step times. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def compute_slowest_rank_times(step_times_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Time of each step: that of its slowest rank. A run is as fast as the rank the others wait for.

    Raises
    ------
    ValueError
        If the ranks timed different numbers of steps.
    """
    return [max(times) for times in zip(*step_times_by_rank, strict=True)]


def compute_period_means(step_times_s: Sequence[float], period: int) -> list[float]:
    """Mean step time of each period of so many consecutive steps: with 1 the step times as they are.

    Raises
    ------
    ValueError
        If the steps are not whole periods.
    """
    if len(step_times_s) % period:
        raise ValueError(f"{len(step_times_s)} steps are not whole periods of {period}")
    return [statistics.fmean(step_times_s[start : start + period]) for start in range(0, len(step_times_s), period)]


def compute_percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` (0 to 1) of the values lie, linear between neighbours."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


def compute_median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Confidence interval of the median from order statistics, whatever the distribution.

    The number of values below the true median is binomial(n, 1/2); the interval runs from the k-th smallest to the
    k-th largest value for the largest k that keeps the confidence (Conover, Practical Nonparametric Statistics,
    section 3.2).

    Returns
    -------
    tuple or None
        None where there are too few values: even their whole range does not hold the median so often. For 95 % it
        takes 6.
    """
    ordered = sorted(values)
    n = len(ordered)
    if 2 * 0.5**n > 1 - confidence:
        return None
    tail_probability, k = 0.0, 0
    for num_below in range(n // 2):
        tail_probability += math.comb(n, num_below) / 2**n
        if 2 * tail_probability > 1 - confidence:
            break
        k = num_below + 1
    return ordered[k - 1], ordered[n - k]


def compute_median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)
