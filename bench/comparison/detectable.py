"""How small a slowdown can be found with so many runs at such a spread. Pure functions."""

from __future__ import annotations

from bench.comparison.power import detectable_slowdown, found_probability
from bench.comparison.settings import Settings
from bench.comparison.timing import POWER, criterion_of


def detectable_change(
    repeats: int,
    spread: float,
    *,
    candidate_repeats: int | None = None,
    configurations: int = 1,
    power: float = POWER,
    settings: Settings | None = None,
) -> float:
    """The smallest true slowdown of one configuration that `compare` calls a regression with probability `power`.

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
    settings = settings or Settings()
    others = repeats if candidate_repeats is None else candidate_repeats
    degrees = configurations * (repeats + others - 2)
    return detectable_slowdown(spread, repeats, others, criterion_of(configurations, settings), power, degrees)


def detection_probability(
    slowdown: float,
    repeats: int,
    spread: float,
    *,
    candidate_repeats: int | None = None,
    configurations: int = 1,
    settings: Settings | None = None,
) -> float:
    """How often `compare` finds a true slowdown of one configuration; parameters as in `detectable_change`."""
    settings = settings or Settings()
    others = repeats if candidate_repeats is None else candidate_repeats
    if min(repeats, others) < 2:
        return 0.0
    degrees = configurations * (repeats + others - 2)
    return found_probability(slowdown, spread, repeats, others, criterion_of(configurations, settings), degrees)
