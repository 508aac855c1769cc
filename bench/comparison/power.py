"""How often a true slowdown is found, and which one just so: what a test of repeated runs can do. Pure functions."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from bench.comparison.statistics import compute_critical_value, compute_error_factor

NUM_QUADRATURE_POINTS = 400
"""Points of the integrals over the spread that a few runs happen to show."""


MIN_DEGREES_FOR_QUIET_LEVEL = 8
"""Degrees of freedom from which on a small spread is believed: five runs of each side."""


@dataclass(frozen=True)
class RegressionCriterion:
    """What is called a regression: a shift that is large enough, and significant."""

    threshold: float
    """Smallest change, a fraction."""
    level: float
    """Significance level of one direction."""
    quiet_level: float
    """The same where runs scatter by no more than `threshold`, which then rules out many false alarms by itself;
    from five runs of each side on."""

    def compute_needed_shift(self, spread: np.ndarray, error_factor: float, degrees: float) -> np.ndarray:
        """The smallest shift of logarithms that is called, by the spread that runs show."""
        quiet_critical_value = compute_critical_value(self.choose_level(0.0, degrees), degrees)
        noisy_critical_value = compute_critical_value(self.level, degrees)
        significant_shift = (
            np.where(spread <= self.threshold, quiet_critical_value, noisy_critical_value) * spread * error_factor
        )
        return np.maximum(math.log1p(self.threshold), significant_shift)

    def choose_level(self, spread: float, degrees: float) -> float:
        """The significance level at the spread that runs show."""
        return self.quiet_level if spread <= self.threshold and degrees >= MIN_DEGREES_FOR_QUIET_LEVEL else self.level


def compute_regression_probability(
    true_change: float,
    spread: float,
    base_runs: int,
    candidate_runs: int,
    criterion: RegressionCriterion,
    degrees: float | None = None,
) -> float:
    """How often a true slowdown is called a regression, if runs scatter normally (in their logarithm).

    The integral is over the spread that so many runs show (a chi distribution); given it, the shift is normal.

    Parameters
    ----------
    degrees: float
        Degrees of freedom of the spread, if it is known better than from these runs alone.
    """
    degrees = base_runs + candidate_runs - 2 if degrees is None else degrees
    true_shift = math.log1p(true_change)
    if spread == 0:
        return float(true_shift >= math.log1p(criterion.threshold) and true_shift > 0)
    error_factor = compute_error_factor(base_runs, candidate_runs)
    needed_shifts = criterion.compute_needed_shift(spread * _compute_shown_spreads(degrees), error_factor, degrees)
    return float(special.ndtr((true_shift - needed_shifts) / (spread * error_factor)).mean())


def compute_detectable_slowdown(
    spread: float,
    base_runs: int,
    candidate_runs: int,
    criterion: RegressionCriterion,
    power: float,
    degrees: float | None = None,
) -> float:
    """The smallest true slowdown that is found with probability `power`: a fraction; NaN if none ever is."""
    if min(base_runs, candidate_runs) < 2:
        return float("nan")
    if spread == 0:
        return criterion.threshold

    def compute_missing_power(log_change: float) -> float:
        return (
            compute_regression_probability(
                math.expm1(log_change), spread, base_runs, candidate_runs, criterion, degrees
            )
            - power
        )

    upper_shift = math.log1p(criterion.threshold) + spread
    while compute_missing_power(upper_shift) < 0:
        upper_shift *= 2
        if upper_shift > 50:
            return float("nan")
    return math.expm1(float(optimize.brentq(compute_missing_power, 0.0, upper_shift, xtol=1e-6)))


@functools.cache
def _compute_shown_spreads(degrees: float) -> np.ndarray:
    """Spreads that runs show, over the true one, at equal steps of probability."""
    probabilities = (np.arange(NUM_QUADRATURE_POINTS) + 0.5) / NUM_QUADRATURE_POINTS
    return np.sqrt(2 * special.gammaincinv(degrees / 2, probabilities) / degrees)
