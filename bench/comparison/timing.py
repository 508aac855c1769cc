"""Verdicts on step times, per configuration and of all together. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.comparison import statistics
from bench.comparison.power import Criterion, detectable_slowdown
from bench.comparison.result import Change
from bench.comparison.settings import Settings
from bench.comparison.statistics import Shift
from bench.comparison.words import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION, TFLOPS, TIME, percent

POWER = 0.95
"""How often a detectable slowdown is found."""

FEW = "one run on a side shows no spread, so nothing can be significant: repeat it (sweep.repeats=5)"


@dataclass(frozen=True)
class Times:
    """Step times of one configuration, in seconds, one per run in the order of the runs."""

    base: tuple[float, ...]
    candidate: tuple[float, ...]
    exact: bool = False
    """Nothing ran, so nothing scatters: predictions."""


@dataclass(frozen=True)
class Judged:
    """A shift, how significant it is among its like, and the verdict."""

    shift: Shift
    p: float
    """Corrected for the number of comparisons."""
    level: float
    """What `p` is held to."""
    verdict: str


TOGETHER, APART = 0.1, 0.6
"""Shares of the false alarms that all configurations together may take (a common shift is easily found), and that each
of them may. The rest is kept back: spreads that inform each other differ, which costs up to half as many again."""

ALONE, QUIET = 0.9, 1.4
"""The level of a single configuration over `Settings.false_alarms`, and the same where its runs scatter by no more than
the threshold.

There the threshold rules out false alarms by itself, so that fewer than `Settings.false_alarms` remain at spreads up to
1.2 % (at the default threshold and five runs); 1.3 times as many are the most, near 1.8 %. Without it a slowdown of 3 %
at a spread of 1 % would be found 93 times in 100 instead of 95: no test of five against five runs that knows nothing of
their spread finds more than 94 and raises no more than 1 % of false alarms at every spread.
`tests/test_comparison_statistics.py` measures these rates.
"""


def criterion_of(configurations: int, settings: Settings) -> Criterion:
    """What the clearest of so many configurations is held to."""
    if configurations == 1:
        return Criterion(settings.threshold, ALONE * settings.false_alarms, min(QUIET * settings.false_alarms, 0.5))
    level = APART * settings.false_alarms / configurations
    return Criterion(settings.threshold, level, level)


def judge(times: Sequence[Times], settings: Settings) -> tuple[list[Judged], Judged | None]:
    """A verdict for each configuration, and one for all together (None if there are none).

    With more than one configuration a small share of `settings.false_alarms` goes to all together, and the rest to the
    configurations, with p values corrected for their number (Holm).
    """
    if not times:
        return [], None
    # A single configuration shows too little of both spreads to tell them apart.
    alike = len(times) == 1 or statistics.spread_alike([(e.base, e.candidate) for e in times if not e.exact])
    shifts = [statistics.shift(each.base, each.candidate, alike=alike) for each in times]
    tested = [number for number, each in enumerate(times) if shifts[number].known and not each.exact]
    for number, shift in zip(tested, statistics.moderated([shifts[number] for number in tested]), strict=True):
        shifts[number] = shift
    corrected = {
        direction: dict(zip(tested, statistics.holm([shifts[i].p_value(direction) for i in tested]), strict=True))
        for direction in (1, -1)
    }
    alone = []
    for number, (each, shift) in enumerate(zip(times, shifts, strict=True)):
        p = corrected[1 if shift.log_change >= 0 else -1].get(number, 1.0)
        level = (
            criterion_of(1, settings).level_at(shift.spread, shift.degrees)
            if len(times) == 1
            else APART * settings.false_alarms
        )
        verdict = _exact(shift, settings) if each.exact else _verdict(shift, p, level, settings)
        alone.append(Judged(shift, p, level, verdict))
    if len(times) == 1:
        return alone, alone[0]
    usable = [times[number] for number in tested] or times
    together = statistics.pooled([(each.base, each.candidate) for each in usable])
    p = together.p_value(1 if together.log_change >= 0 else -1)
    level = TOGETHER * settings.false_alarms
    exact = all(each.exact for each in times)
    verdict = _exact(together, settings) if exact else _verdict(together, p, level, settings)
    return alone, Judged(together, p, level, verdict)


def _exact(shift: Shift, settings: Settings) -> str:
    return _direction(shift) if abs(shift.change) >= settings.threshold and shift.change else NO_CHANGE


def _verdict(shift: Shift, p: float, level: float, settings: Settings) -> str:
    if not shift.known:
        return CANNOT_TELL
    if abs(shift.log_change) >= math.log1p(settings.threshold) and p <= level:
        return _direction(shift)
    low, high = shift.interval(settings.confidence)
    return NO_CHANGE if -settings.margin <= low and high <= settings.margin else CANNOT_TELL


def _direction(shift: Shift) -> str:
    return REGRESSION if shift.log_change > 0 else IMPROVEMENT


def time_changes(times: Sequence[Times], settings: Settings) -> tuple[list[Change], Change | None]:
    """What `judge` says, with all numbers."""
    if not times:
        return [], None
    alone, together = judge(times, settings)
    criterion = criterion_of(len(times), settings)
    changes = [_change(each, judged, criterion, settings) for each, judged in zip(times, alone, strict=True)]
    if together is None or len(times) == 1:
        return changes, changes[0]
    usable = [each for each, judged in zip(times, alone, strict=True) if judged.shift.known] or times
    longest = [max((getattr(each, side) for each in usable), key=len) for side in ("base", "candidate")]
    criterion = Criterion(settings.threshold, together.level, together.level)
    every = _change(Times(longest[0], longest[1], all(each.exact for each in times)), together, criterion, settings)
    return changes, replace(every, base=None, candidate=None)


def _change(times: Times, judged: Judged, criterion: Criterion, settings: Settings) -> Change:
    """All numbers."""
    shift, tested = judged.shift, judged.shift.known and not times.exact
    low, high = shift.interval(settings.confidence) if tested else (None, None)
    detectable = None
    if tested:
        runs = len(times.base), len(times.candidate)
        least = detectable_slowdown(shift.error_spread(*runs), *runs, criterion, POWER, shift.degrees)
        detectable = None if math.isnan(least) else least
    return Change(
        TIME.column,
        judged.verdict,
        _reason(judged, detectable, exact=times.exact),
        float(np.exp(np.mean(np.log(times.base)))),
        float(np.exp(np.mean(np.log(times.candidate)))),
        len(times.base),
        len(times.candidate),
        shift.change,
        low,
        high,
        judged.p if tested else None,
        shift.spread if tested else None,
        detectable,
    )


def _reason(judged: Judged, detectable: float | None, *, exact: bool) -> str:
    if judged.verdict in (REGRESSION, IMPROVEMENT):
        return f"step time {percent(judged.shift.change)}"
    if judged.verdict == NO_CHANGE or exact:
        return ""
    if not judged.shift.known:
        return FEW
    scatter = f"runs scatter by {percent(judged.shift.spread, signed=False)}"
    if detectable is None:
        return scatter
    return f"{scatter}: only a slowdown of {percent(detectable, signed=False)} would be found 95 times in 100"


def throughput_change(time: Change, base: Sequence[float], candidate: Sequence[float], settings: Settings) -> Change:
    """TFLOPS per GPU: the inverse of the time, with its verdict, as long as a step's FLOPs are counted as before."""
    found = statistics.shift(base, candidate)
    tested = found.known and time.low is not None
    low, high = found.interval(settings.confidence) if tested else (None, None)
    means = [float(np.exp(np.mean(np.log(side)))) for side in (base, candidate)]
    return replace(
        time,
        quantity=TFLOPS.column,
        reason="",
        base=means[0],
        candidate=means[1],
        change=found.change,
        low=low,
        high=high,
        detectable=None,
    )
