"""Is one set of runs slower than another? Repeated runs are the unit, never the steps inside them. Pure functions.

Times are compared as logarithms: a change is then a ratio, and the mean of several the geometric one. The test is
Student's, with the spread pooled over both sides: if nothing changed, both sides have the same. Where several
configurations are compared, their spreads inform each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special

CAUTION = 0.8
"""Probability with which the variances of several configurations differ no more than is assumed."""

UNLIKE = 0.02
"""Significance at which the two sides are taken to scatter differently."""

OUTLIER = 0.02
"""A variance that is less probable than this under the common one is left alone."""


@dataclass(frozen=True)
class Shift:
    """By how much the logarithms of one side's values lie above the other's."""

    log_change: float
    standard_error: float
    degrees: float
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
        return _expm1(self.log_change)

    def error_spread(self, base_runs: int, candidate_runs: int) -> float:
        """The spread that belongs to the standard error, which may be informed by other configurations."""
        return self.standard_error / factor_of(base_runs, candidate_runs)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided confidence interval of `change`; NaN where there is no spread to tell it from."""
        if not self.known:
            return float("nan"), float("nan")
        half = critical((1 - confidence) / 2, self.degrees) * self.standard_error
        return _expm1(self.log_change - half), _expm1(self.log_change + half)

    def p_value(self, direction: int) -> float:
        """Probability of a shift at least as far in one direction (1 up, -1 down) if nothing changed; 1 if unknown."""
        if not self.known:
            return 1.0
        if self.standard_error == 0:
            return 0.0 if direction * self.log_change > 0 else 1.0
        return float(special.stdtr(self.degrees, -direction * self.log_change / self.standard_error))


def _expm1(exponent: float) -> float:
    """The change that a difference of logarithms is; infinite where no number is so large."""
    return math.expm1(exponent) if exponent < 700 else math.inf


def shift(base: Sequence[float], candidate: Sequence[float], *, alike: bool = True) -> Shift:
    """The shift between two sets of positive values, one of each run.

    Its spread is known from two runs of each side on.

    Parameters
    ----------
    alike: bool
        Both sides have one spread (Student's test); else each has its own (Welch's).
    """
    logs = [np.log(np.asarray(side, dtype=float)) for side in (base, candidate)]
    log_change = float(logs[1].mean() - logs[0].mean())
    counts = [len(side) for side in logs]
    if min(counts) < 2:
        return Shift(log_change, float("nan"), 0, float("nan"))
    squares = [float(((side - side.mean()) ** 2).sum()) for side in logs]
    degrees: float = sum(counts) - 2
    error = math.sqrt(sum(squares) / degrees) * factor_of(*counts)
    if not alike and min(squares) > 0:
        parts = [square / (count - 1) / count for square, count in zip(squares, counts, strict=True)]
        error = math.sqrt(sum(parts))
        degrees = sum(parts) ** 2 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    return Shift(log_change, error, degrees, error / factor_of(*counts))


def spread_alike(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> bool:
    """Whether base and candidate may scatter alike, by an F test over all configurations (two-sided)."""
    squares, degrees = [0.0, 0.0], [0, 0]
    for pair in pairs:
        for side, values in enumerate(pair):
            logs = np.log(np.asarray(values, dtype=float))
            squares[side] += float(((logs - logs.mean()) ** 2).sum())
            degrees[side] += len(logs) - 1
    if min(degrees) < 1 or min(squares) <= 0:
        return True
    ratio = squares[0] / degrees[0] / (squares[1] / degrees[1])
    return 2 * min(special.fdtrc(*degrees, ratio), special.fdtr(*degrees, ratio)) >= UNLIKE


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
    factor = factor_of(*units)
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


def moderated(shifts: Sequence[Shift]) -> list[Shift]:
    """Shifts whose standard errors borrow from each other: a few runs say little of a spread, those of many say more.

    Variances are drawn towards a common one, the more so the less they differ beyond chance (empirical Bayes: Smyth,
    "Linear models and empirical Bayes methods for assessing differential expression in microarray experiments",
    Statistical Applications in Genetics and Molecular Biology 3, 2004, sections 4 and 6.2). A configuration that
    scatters clearly more than the common variance allows keeps its own.
    """
    usable = [number for number, shift in enumerate(shifts) if shift.known and shift.spread > 0]
    if len(usable) < 2:
        return list(shifts)
    variances = np.array([shifts[number].spread ** 2 for number in usable])
    degrees = np.array([float(shifts[number].degrees) for number in usable])
    prior_degrees, prior = _prior(variances, degrees)
    found = list(shifts)
    for number, variance, own in zip(usable, variances, degrees, strict=True):
        if special.fdtrc(own, min(prior_degrees, 1e6), variance / prior) < OUTLIER:
            continue
        share = 0.0 if math.isinf(prior_degrees) else own / (own + prior_degrees)
        scale = math.sqrt(share + (1 - share) * prior / variance)
        error = shifts[number].standard_error * scale
        found[number] = replace(found[number], standard_error=error, degrees=min(own + prior_degrees, degrees.sum()))
    return found


def _prior(variances: np.ndarray, degrees: np.ndarray) -> tuple[float, float]:
    """Degrees of freedom and value of the common variance, from the moments of the logarithms.

    How much the variances differ is taken at the upper end of what is likely: few of them may look alike by chance.
    """
    logs = np.log(variances) - special.digamma(degrees / 2) + np.log(degrees / 2)
    surely = float(special.chdtri(len(logs) - 1, CAUTION)) / (len(logs) - 1)
    excess = float(logs.var(ddof=1)) / surely - float(special.polygamma(1, degrees / 2).mean())
    if excess <= 0:
        return float("inf"), float(np.average(variances, weights=degrees))
    half = float(optimize.brentq(lambda x: float(special.polygamma(1, math.exp(x))) - excess, -20, 40))
    half = math.exp(half)
    return 2 * half, math.exp(float(logs.mean()) + float(special.digamma(half)) - math.log(half))


@functools.cache
def critical(level: float, degrees: float) -> float:
    """The standardised shift above which one direction is significant at `level`."""
    return float(-special.stdtrit(degrees, level))


def factor_of(base_runs: int, candidate_runs: int) -> float:
    """Standard error of the shift over the spread of the runs."""
    return math.sqrt(1 / base_runs + 1 / candidate_runs)
