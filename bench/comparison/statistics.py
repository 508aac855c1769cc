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

PRIOR_CONFIDENCE = 0.8
"""Probability with which the variances of several configurations differ no more than is assumed."""

UNEQUAL_SPREAD_LEVEL = 0.02
"""Significance at which the two sides are taken to scatter differently."""

OUTLIER_VARIANCE_LEVEL = 0.02
"""A variance that is less probable than this under the common one is left alone."""


@dataclass(frozen=True)
class LogShift:
    """By how much the logarithms of one side's values lie above the other's."""

    log_change: float
    standard_error: float
    degrees: float
    """Degrees of freedom of the standard error; 0 if there is none."""
    spread: float
    """Standard deviation of the logarithms from run to run: 0.01 is 1 %."""

    @property
    def has_spread(self) -> bool:
        """Whether the runs show a spread, without which nothing is significant."""
        return self.degrees > 0

    @property
    def change(self) -> float:
        """Candidate over base, less 1."""
        return _convert_log_change(self.log_change)

    def compute_error_spread(self, base_runs: int, candidate_runs: int) -> float:
        """The spread that belongs to the standard error, which may be informed by other configurations."""
        return self.standard_error / compute_error_factor(base_runs, candidate_runs)

    def compute_interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided confidence interval of `change`; NaN where there is no spread to tell it from."""
        if not self.has_spread:
            return float("nan"), float("nan")
        half_width = compute_critical_value((1 - confidence) / 2, self.degrees) * self.standard_error
        return _convert_log_change(self.log_change - half_width), _convert_log_change(self.log_change + half_width)

    def compute_p_value(self, direction: int) -> float:
        """Probability of a shift at least as far in one direction (1 up, -1 down) if nothing changed; 1 if unknown."""
        if not self.has_spread:
            return 1.0
        if self.standard_error == 0:
            return 0.0 if direction * self.log_change > 0 else 1.0
        return float(special.stdtr(self.degrees, -direction * self.log_change / self.standard_error))


def _convert_log_change(exponent: float) -> float:
    """The change that a difference of logarithms is; infinite where no number is so large."""
    return math.expm1(exponent) if exponent < 700 else math.inf


def compute_shift(base: Sequence[float], candidate: Sequence[float], *, equal_spread: bool = True) -> LogShift:
    """The shift between two sets of positive values, one of each run.

    Its spread is known from two runs of each side on.

    Parameters
    ----------
    equal_spread: bool
        Both sides have one spread (Student's test); else each has its own (Welch's).
    """
    side_logs = [np.log(np.asarray(side, dtype=float)) for side in (base, candidate)]
    log_change = float(side_logs[1].mean() - side_logs[0].mean())
    counts = [len(side) for side in side_logs]
    if min(counts) < 2:
        return LogShift(log_change, float("nan"), 0, float("nan"))
    sums_of_squares = [float(((side - side.mean()) ** 2).sum()) for side in side_logs]
    degrees: float = sum(counts) - 2
    standard_error = math.sqrt(sum(sums_of_squares) / degrees) * compute_error_factor(*counts)
    if not equal_spread and min(sums_of_squares) > 0:
        variance_terms = [square / (count - 1) / count for square, count in zip(sums_of_squares, counts, strict=True)]
        standard_error = math.sqrt(sum(variance_terms))
        degrees = sum(variance_terms) ** 2 / sum(
            term**2 / (count - 1) for term, count in zip(variance_terms, counts, strict=True)
        )
    return LogShift(log_change, standard_error, degrees, standard_error / compute_error_factor(*counts))


def has_equal_spread(value_pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> bool:
    """Whether base and candidate may scatter alike, by an F test over all configurations (two-sided)."""
    squares, degrees = [0.0, 0.0], [0, 0]
    for value_pair in value_pairs:
        for side, values in enumerate(value_pair):
            logs = np.log(np.asarray(values, dtype=float))
            squares[side] += float(((logs - logs.mean()) ** 2).sum())
            degrees[side] += len(logs) - 1
    if min(degrees) < 1 or min(squares) <= 0:
        return True
    variance_ratio = squares[0] / degrees[0] / (squares[1] / degrees[1])
    return (
        2 * min(special.fdtrc(*degrees, variance_ratio), special.fdtr(*degrees, variance_ratio)) >= UNEQUAL_SPREAD_LEVEL
    )


def pool_shifts(value_pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> LogShift:
    """The mean shift of several configurations, each given by the values of its base and its candidate runs.

    The values of a configuration are in the order of its runs. What disturbs one repetition of a sweep disturbs all
    configurations in it (a machine that is slower for five minutes), so the k-th runs of all configurations are one
    repetition and the unit here: their residuals are summed before they are squared, as in a variance that is robust
    to clusters (Liang and Zeger, "Longitudinal data analysis using generalized linear models", Biometrika 73, 1986).
    The standard error is that, or the one for independent runs if it is larger; the degrees of freedom are those of
    the repetitions.
    """
    log_changes = [
        np.log(np.asarray(candidate_values, float)).mean() - np.log(np.asarray(base_values, float)).mean()
        for base_values, candidate_values in value_pairs
    ]
    log_change = float(np.mean(log_changes))
    sum_of_squares, independent_variance, degrees, unit_counts = 0.0, 0.0, 0, []
    for side in (0, 1):
        side_logs = [np.log(np.asarray(value_pair[side], dtype=float)) for value_pair in value_pairs]
        count = max(len(values) for values in side_logs)
        if min(len(values) for values in side_logs) < 2:
            return LogShift(log_change, float("nan"), 0, float("nan"))
        repetition_sums = np.zeros(count)
        for values in side_logs:
            residuals = (values - values.mean()) / len(values)
            repetition_sums[: len(values)] += residuals
            independent_variance += (
                float((residuals**2).sum()) * len(values) / (len(values) - 1) / len(value_pairs) ** 2
            )
        sum_of_squares += float((repetition_sums**2).sum()) * count**2 / len(value_pairs) ** 2
        degrees += count - 1
        unit_counts.append(count)
    error_factor = compute_error_factor(*unit_counts)
    standard_error = max(math.sqrt(sum_of_squares / degrees) * error_factor, math.sqrt(independent_variance))
    return LogShift(log_change, standard_error, degrees, standard_error / error_factor)


def pool_paired_shifts(value_pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> LogShift:
    """The mean shift of several configurations whose base and candidate runs were made in turn, round by round.

    The k-th runs of all configurations are the k-th round. A machine that drifts is about as fast for both sides of a
    round, so what counts is the scatter of the rounds' differences, each the mean over the configurations. The standard
    error is that, or the one for configurations that scatter independently if it is larger.

    Parameters
    ----------
    value_pairs: sequence of pairs
        Times of base and candidate of every configuration, equally many of all, in the order of the rounds.
    """
    differences = np.array([np.log(candidate) - np.log(base) for base, candidate in value_pairs])
    num_configurations, num_rounds = differences.shape
    log_change = float(differences.mean())
    if num_rounds < 2:
        return LogShift(log_change, float("nan"), 0, float("nan"))
    round_variance = float(differences.mean(axis=0).var(ddof=1)) / num_rounds
    independent_variance = float(differences.var(axis=1, ddof=1).sum()) / num_rounds / num_configurations**2
    standard_error = math.sqrt(max(round_variance, independent_variance))
    error_factor = compute_error_factor(num_rounds, num_rounds)
    return LogShift(log_change, standard_error, num_rounds - 1, standard_error / error_factor)


def correct_p_values(p_values: Sequence[float]) -> list[float]:
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


def moderate_shifts(shifts: Sequence[LogShift]) -> list[LogShift]:
    """Shifts whose standard errors borrow from each other: a few runs say little of a spread, those of many say more.

    Variances are drawn towards a common one, the more so the less they differ beyond chance (empirical Bayes: Smyth,
    "Linear models and empirical Bayes methods for assessing differential expression in microarray experiments",
    Statistical Applications in Genetics and Molecular Biology 3, 2004, sections 4 and 6.2). A configuration that
    scatters clearly more than the common variance allows keeps its own.
    """
    usable_indices = [index for index, shift in enumerate(shifts) if shift.has_spread and shift.spread > 0]
    if len(usable_indices) < 2:
        return list(shifts)
    variances = np.array([shifts[index].spread ** 2 for index in usable_indices])
    degrees = np.array([float(shifts[index].degrees) for index in usable_indices])
    prior_degrees, prior_variance = _fit_prior(variances, degrees)
    moderated_shifts = list(shifts)
    for index, variance, own_degrees in zip(usable_indices, variances, degrees, strict=True):
        if special.fdtrc(own_degrees, min(prior_degrees, 1e6), variance / prior_variance) < OUTLIER_VARIANCE_LEVEL:
            continue
        own_share = 0.0 if math.isinf(prior_degrees) else own_degrees / (own_degrees + prior_degrees)
        scale = math.sqrt(own_share + (1 - own_share) * prior_variance / variance)
        standard_error = shifts[index].standard_error * scale
        moderated_shifts[index] = replace(
            moderated_shifts[index],
            standard_error=standard_error,
            degrees=min(own_degrees + prior_degrees, degrees.sum()),
        )
    return moderated_shifts


def _fit_prior(variances: np.ndarray, degrees: np.ndarray) -> tuple[float, float]:
    """Degrees of freedom and value of the common variance, from the moments of the logarithms.

    How much the variances differ is taken at the upper end of what is likely: few of them may look alike by chance.
    """
    log_variances = np.log(variances) - special.digamma(degrees / 2) + np.log(degrees / 2)
    variance_quantile = float(special.chdtri(len(log_variances) - 1, PRIOR_CONFIDENCE)) / (len(log_variances) - 1)
    excess_variance = float(log_variances.var(ddof=1)) / variance_quantile - float(
        special.polygamma(1, degrees / 2).mean()
    )
    if excess_variance <= 0:
        return float("inf"), float(np.average(variances, weights=degrees))
    half_degrees = float(optimize.brentq(lambda x: float(special.polygamma(1, math.exp(x))) - excess_variance, -20, 40))
    half_degrees = math.exp(half_degrees)
    return 2 * half_degrees, math.exp(
        float(log_variances.mean()) + float(special.digamma(half_degrees)) - math.log(half_degrees)
    )


@functools.cache
def compute_critical_value(level: float, degrees: float) -> float:
    """The standardised shift above which one direction is significant at `level`."""
    return float(-special.stdtrit(degrees, level))


def compute_error_factor(base_runs: int, candidate_runs: int) -> float:
    """Standard error of the shift over the spread of the runs."""
    return math.sqrt(1 / base_runs + 1 / candidate_runs)


# --- How often a true slowdown is found, and which one just so: what a test of repeated runs can do. Pure functions.

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
