"""Is one set of runs slower than another? Repeated runs are the unit, never the steps inside them. Pure functions.

Times are compared as logarithms: a change is then a ratio, and the mean of several the geometric one. The test is
Student's, with the spread pooled over both sides: if nothing changed, both sides have the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

NODES = 400
"""Points of the integrals over the spread that a few runs happen to show."""


@dataclass(frozen=True)
class Shift:
    """By how much the logarithms of one side's values lie above the other's."""

    log_change: float
    standard_error: float
    degrees: int
    """Degrees of freedom of the standard error; 0 if there is none."""
    spread: float
    """Standard deviation of the logarithms from run to run: 0.01 is 1 %."""

    @property
    def known(self) -> bool:
        """Whether the runs show a spread, without which nothing is significant."""
        return self.degrees > 0

    @property
    def change(self) -> float:
        """Candidate over base, less 1."""
        return math.expm1(self.log_change)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided confidence interval of `change`; NaN where there is no spread to tell it from."""
        if not self.known:
            return float("nan"), float("nan")
        half = float(stats.t.isf((1 - confidence) / 2, self.degrees)) * self.standard_error
        return math.expm1(self.log_change - half), math.expm1(self.log_change + half)

    def p_value(self, direction: int) -> float:
        """Probability of a shift at least as far in one direction (1 up, -1 down) if nothing changed; 1 if unknown."""
        if not self.known:
            return 1.0
        if self.standard_error == 0:
            return 0.0 if direction * self.log_change > 0 else 1.0
        return float(stats.t.sf(direction * self.log_change / self.standard_error, self.degrees))


def shift(base: Sequence[float], candidate: Sequence[float]) -> Shift:
    """The shift between two sets of positive values, one of each run.

    Its spread is known from two runs of each side on.
    """
    logs = [np.log(np.asarray(side, dtype=float)) for side in (base, candidate)]
    log_change = float(logs[1].mean() - logs[0].mean())
    if min(len(side) for side in logs) < 2:
        return Shift(log_change, float("nan"), 0, float("nan"))
    degrees = sum(len(side) - 1 for side in logs)
    spread = math.sqrt(sum(float(((side - side.mean()) ** 2).sum()) for side in logs) / degrees)
    return Shift(log_change, spread * _factor(*(len(side) for side in logs)), degrees, spread)


def pooled(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Shift:
    """The mean shift of several configurations, each given by the values of its base and its candidate runs.

    The values of a configuration are in the order of its runs. What disturbs one repetition of a sweep disturbs all
    configurations in it (a machine that is slower for five minutes), so the k-th runs of all configurations are one
    repetition and the unit here: their residuals are summed before they are squared, as in a variance that is robust
    to clusters (Liang and Zeger, "Longitudinal data analysis using generalized linear models", Biometrika 73, 1986).
    The standard error is that, or the one for independent runs if it is larger; the degrees of freedom are those of
    the repetitions.
    """
    changes = [np.log(np.asarray(c, float)).mean() - np.log(np.asarray(b, float)).mean() for b, c in pairs]
    log_change = float(np.mean(changes))
    squares, independent, degrees, units = 0.0, 0.0, 0, []
    for side in (0, 1):
        logs = [np.log(np.asarray(pair[side], dtype=float)) for pair in pairs]
        count = max(len(values) for values in logs)
        if min(len(values) for values in logs) < 2:
            return Shift(log_change, float("nan"), 0, float("nan"))
        sums = np.zeros(count)
        for values in logs:
            residuals = (values - values.mean()) / len(values)
            sums[: len(values)] += residuals
            independent += float((residuals**2).sum()) * len(values) / (len(values) - 1) / len(pairs) ** 2
        squares += float((sums**2).sum()) * count**2 / len(pairs) ** 2
        degrees += count - 1
        units.append(count)
    factor = _factor(*units)
    error = max(math.sqrt(squares / degrees) * factor, math.sqrt(independent))
    return Shift(log_change, error, degrees, error / factor)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number, so that the smallest of them is no more often below a level than one is.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
    """
    order = np.argsort(p_values, kind="stable")
    corrected = np.empty(len(p_values))
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        corrected[index] = min(largest, 1.0)
    return [float(p) for p in corrected]


def found_probability(
    true_change: float, spread: float, base_runs: int, candidate_runs: int, level: float, threshold: float
) -> float:
    """How often a true slowdown is called a regression, if runs scatter normally (in their logarithm).

    Called is what is at least `threshold` and significant at `level`. The integral is over the spread that so many
    runs show (a chi distribution); given it, the shift is normal.
    """
    degrees = base_runs + candidate_runs - 2
    if degrees < 2:
        return 0.0
    shift_, least = math.log1p(true_change), math.log1p(threshold)
    if spread == 0:
        return float(shift_ >= least and shift_ > 0)
    error = spread * _factor(base_runs, candidate_runs)
    needed = np.maximum(least, critical(level, degrees) * error * _seen(degrees))
    return float(stats.norm.sf((needed - shift_) / error).mean())


def detectable_slowdown(
    spread: float, base_runs: int, candidate_runs: int, level: float, threshold: float, power: float
) -> float:
    """The smallest true slowdown that is found with probability `power`: a fraction; NaN if none ever is."""
    if min(base_runs, candidate_runs) < 2:
        return float("nan")

    def missing(log_change: float) -> float:
        true = math.expm1(log_change)
        return found_probability(true, spread, base_runs, candidate_runs, level, threshold) - power

    high = math.log1p(threshold) + 1e-6
    while missing(high) < 0:
        high *= 2
        if high > 50:
            return float("nan")
    low = 0.0 if missing(0.0) < 0 else -1e-9
    if low < 0:
        return 0.0
    return math.expm1(float(optimize.brentq(missing, low, high, xtol=1e-7))) if spread > 0 else threshold


@functools.cache
def critical(level: float, degrees: int) -> float:
    """The standardised shift above which one direction is significant at `level`."""
    return float(stats.t.isf(level, degrees))


@functools.cache
def _seen(degrees: int) -> np.ndarray:
    """Spreads that runs show, over the true one, at equal steps of probability."""
    probabilities = (np.arange(NODES) + 0.5) / NODES
    return np.sqrt(stats.chi2.ppf(probabilities, degrees) / degrees)


def _factor(base_runs: int, candidate_runs: int) -> float:
    """Standard error of the shift over the spread of the runs."""
    return math.sqrt(1 / base_runs + 1 / candidate_runs)
