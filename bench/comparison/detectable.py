"""How small a slowdown can be found with so many runs at such a spread. Pure functions."""

from __future__ import annotations

from bench.comparison.power import compute_detectable_slowdown, compute_regression_probability
from bench.comparison.settings import ComparisonSettings
from bench.comparison.timing import DETECTION_POWER, build_criterion


def compute_detectable_change(
    repeats: int,
    spread: float,
    *,
    candidate_repeats: int | None = None,
    configurations: int = 1,
    power: float = DETECTION_POWER,
    settings: ComparisonSettings | None = None,
) -> float:
    """The smallest true slowdown of one configuration that `compare_records` calls a regression with probability
    `power`.

    Parameters
    ----------
    repeats: int
        Runs of the base; of the candidate, too, unless `candidate_repeats` is given.
    spread: float
        Standard deviation of a run's step time from run to run, as a fraction: 0.01 is 1 %.
    configurations: int
        How many are compared, all with that spread: with more of them each has to be clearer, so that false alarms
        stay as rare, but the spread is known better.

    Returns
    -------
    float
        A fraction; NaN with fewer than two runs on a side, which show no spread.
    """
    settings = settings or ComparisonSettings()
    candidate_runs = repeats if candidate_repeats is None else candidate_repeats
    degrees = configurations * (repeats + candidate_runs - 2)
    return compute_detectable_slowdown(
        spread, repeats, candidate_runs, build_criterion(configurations, settings), power, degrees
    )


def compute_detection_probability(
    slowdown: float,
    repeats: int,
    spread: float,
    *,
    candidate_repeats: int | None = None,
    configurations: int = 1,
    settings: ComparisonSettings | None = None,
) -> float:
    """How often `compare` finds a true slowdown of one configuration; parameters as in `detectable_change`."""
    settings = settings or ComparisonSettings()
    candidate_runs = repeats if candidate_repeats is None else candidate_repeats
    if min(repeats, candidate_runs) < 2:
        return 0.0
    degrees = configurations * (repeats + candidate_runs - 2)
    return compute_regression_probability(
        slowdown, spread, repeats, candidate_runs, build_criterion(configurations, settings), degrees
    )
