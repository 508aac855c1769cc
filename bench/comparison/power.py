"""How often a true slowdown is found, and which one just so: what a test of repeated runs can do. Pure functions."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from bench.comparison.statistics import critical, factor_of

NODES = 400
"""Points of the integrals over the spread that a few runs happen to show."""


ENOUGH = 8
"""Degrees of freedom from which on a small spread is believed: five runs of each side."""


@dataclass(frozen=True)
class Criterion:
    """What is called a regression: a shift that is large enough, and significant."""

    threshold: float
    """Smallest change, a fraction."""
    level: float
    """Significance level of one direction."""
    quiet_level: float
    """The same where runs scatter by no more than `threshold`, which then rules out many false alarms by itself;
    from five runs of each side on."""

    def needed(self, spread: np.ndarray, factor: float, degrees: float) -> np.ndarray:
        """The smallest shift of logarithms that is called, by the spread that runs show."""
        quiet = critical(self.level_at(0.0, degrees), degrees)
        noisy = critical(self.level, degrees)
        significant = np.where(spread <= self.threshold, quiet, noisy) * spread * factor
        return np.maximum(math.log1p(self.threshold), significant)

    def level_at(self, spread: float, degrees: float) -> float:
        """The significance level at the spread that runs show."""
        return self.quiet_level if spread <= self.threshold and degrees >= ENOUGH else self.level


def found_probability(
    true_change: float,
    spread: float,
    base_runs: int,
    candidate_runs: int,
    criterion: Criterion,
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
    shift_ = math.log1p(true_change)
    if spread == 0:
        return float(shift_ >= math.log1p(criterion.threshold) and shift_ > 0)
    factor = factor_of(base_runs, candidate_runs)
    needed = criterion.needed(spread * _seen(degrees), factor, degrees)
    return float(special.ndtr((shift_ - needed) / (spread * factor)).mean())


def detectable_slowdown(
    spread: float, base_runs: int, candidate_runs: int, criterion: Criterion, power: float, degrees: float | None = None
) -> float:
    """The smallest true slowdown that is found with probability `power`: a fraction; NaN if none ever is."""
    if min(base_runs, candidate_runs) < 2:
        return float("nan")
    if spread == 0:
        return criterion.threshold

    def missing(log_change: float) -> float:
        return found_probability(math.expm1(log_change), spread, base_runs, candidate_runs, criterion, degrees) - power

    high = math.log1p(criterion.threshold) + spread
    while missing(high) < 0:
        high *= 2
        if high > 50:
            return float("nan")
    return math.expm1(float(optimize.brentq(missing, 0.0, high, xtol=1e-6)))


@functools.cache
def _seen(degrees: float) -> np.ndarray:
    """Spreads that runs show, over the true one, at equal steps of probability."""
    probabilities = (np.arange(NODES) + 0.5) / NODES
    return np.sqrt(2 * special.gammaincinv(degrees / 2, probabilities) / degrees)
