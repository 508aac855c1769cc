"""Verdicts on step times, per configuration and of all together. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.comparison import statistics
from bench.comparison.result import Change
from bench.comparison.settings import Settings
from bench.comparison.statistics import Shift
from bench.comparison.words import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION, TFLOPS, TIME, percent

POWER = 0.95
"""How often a detectable slowdown is found."""

FEW = "one run on a side shows no spread: nothing can be significant, repeat it (sweep.repeats=5)"


@dataclass(frozen=True)
class Times:
    """Step times of one configuration, in seconds, one per run in the order of the runs."""

    base: tuple[float, ...]
    candidate: tuple[float, ...]
    exact: bool = False
    """Nothing ran, so nothing scatters: predictions."""


def time_changes(times: Sequence[Times], settings: Settings) -> tuple[list[Change], Change | None]:
    """A verdict for each configuration, and one for all together (None if there are none).

    False alarms: with more than one configuration, half of `settings.false_alarms` goes to the configurations, whose
    p values are corrected for their number (Holm), and half to all together.
    """
    if not times:
        return [], None
    shifts = [statistics.shift(each.base, each.candidate) for each in times]
    tested = [index for index, each in enumerate(times) if not each.exact and shifts[index].known]
    alone = len(tested) == 1 and len(times) == 1
    level = settings.false_alarms if alone else settings.false_alarms / 2
    corrected: dict[tuple[int, int], float] = {}
    for direction in (1, -1):
        p_values = statistics.holm([shifts[index].p_value(direction) for index in tested])
        corrected |= {(index, direction): p for index, p in zip(tested, p_values, strict=True)}
    changes = []
    for index, (each, found) in enumerate(zip(times, shifts, strict=True)):
        if each.exact:
            changes.append(_exact(each, found, settings))
            continue
        direction = 1 if found.log_change >= 0 else -1
        p = corrected.get((index, direction), 1.0)
        # Of several configurations the smallest p value is held to the level over their number.
        changes.append(_tested(each, found, p, level, len(tested), settings))
    if len(times) == 1:
        return changes, replace(changes[0])
    return changes, _together(times, shifts, settings)


def _exact(times: Times, found: Shift, settings: Settings) -> Change:
    verdict = _direction(found.change) if abs(found.change) >= settings.threshold and found.change else NO_CHANGE
    return _change(times, found, verdict, "", None, None, settings)


def _tested(times: Times, found: Shift, p: float, level: float, count: int, settings: Settings) -> Change:
    if not found.known:
        return _change(times, found, CANNOT_TELL, FEW, None, None, settings)
    detectable = statistics.detectable_slowdown(
        found.spread, len(times.base), len(times.candidate), level / count, settings.threshold, POWER
    )
    verdict, reason = _verdict(found, p <= level, detectable, settings)
    return _change(times, found, verdict, reason, p, detectable, settings)


def _together(times: Sequence[Times], shifts: Sequence[Shift], settings: Settings) -> Change:
    """All configurations: those that can be tested if there are any, else no more than an estimate."""
    if all(each.exact for each in times):
        found = Shift(float(np.mean([each.log_change for each in shifts])), float("nan"), 0, float("nan"))
        verdict = _direction(found.change) if abs(found.change) >= settings.threshold and found.change else NO_CHANGE
        return _change(_all(times), found, verdict, "", None, None, settings)
    usable = [each for each, found in zip(times, shifts, strict=True) if found.known and not each.exact]
    if not usable:
        found = statistics.pooled([(each.base, each.candidate) for each in times])
        return _change(_all(times), found, CANNOT_TELL, FEW, None, None, settings)
    found = statistics.pooled([(each.base, each.candidate) for each in usable])
    level = settings.false_alarms / 2 if len(times) > 1 else settings.false_alarms
    runs = [max(len(side) for side in sides) for sides in zip(*((e.base, e.candidate) for e in usable), strict=True)]
    detectable = statistics.detectable_slowdown(found.spread, runs[0], runs[1], level, settings.threshold, POWER)
    p = found.p_value(1 if found.log_change >= 0 else -1)
    verdict, reason = _verdict(found, p <= level, detectable, settings)
    return _change(_all(usable), found, verdict, reason, p, detectable, settings)


def _all(times: Sequence[Times]) -> Times:
    return Times(tuple(t for each in times for t in each.base), tuple(t for each in times for t in each.candidate))


def _direction(change: float) -> str:
    return REGRESSION if change > 0 else IMPROVEMENT


def _verdict(found: Shift, significant: bool, detectable: float, settings: Settings) -> tuple[str, str]:
    large = abs(found.log_change) >= math.log1p(settings.threshold)
    low, high = found.interval(settings.confidence)
    if large and significant:
        return _direction(found.change), f"step time {percent(found.change)}"
    if -settings.margin <= low and high <= settings.margin:
        return NO_CHANGE, ""
    least = "none at all" if math.isnan(detectable) else f"of {percent(detectable, signed=False)}"
    return CANNOT_TELL, f"runs scatter by {percent(found.spread, signed=False)}: a slowdown {least} would be found 95 times in 100"


def _change(
    times: Times,
    found: Shift,
    verdict: str,
    reason: str,
    p: float | None,
    detectable: float | None,
    settings: Settings,
) -> Change:
    low, high = found.interval(settings.confidence)
    return Change(
        TIME.column,
        verdict,
        reason,
        float(np.exp(np.mean(np.log(times.base)))),
        float(np.exp(np.mean(np.log(times.candidate)))),
        len(times.base),
        len(times.candidate),
        found.change,
        None if math.isnan(low) else low,
        None if math.isnan(high) else high,
        p,
        None if math.isnan(found.spread) else found.spread,
        None if detectable is None or math.isnan(detectable) else detectable,
    )


def throughput_change(time: Change, base: Sequence[float], candidate: Sequence[float], settings: Settings) -> Change:
    """TFLOPS per GPU: the inverse of the time, with its verdict, as long as a step's FLOPs are counted as before."""
    found = statistics.shift(base, candidate)
    low, high = found.interval(settings.confidence)
    means = [float(np.exp(np.mean(np.log(side)))) for side in (base, candidate)]
    return replace(
        time,
        quantity=TFLOPS.column,
        reason="",
        base=means[0],
        candidate=means[1],
        change=found.change,
        low=None if math.isnan(low) else low,
        high=None if math.isnan(high) else high,
    )


def level_of(configurations: int, settings: Settings) -> float:
    """Significance level of the clearest of so many configurations."""
    return settings.false_alarms if configurations == 1 else settings.false_alarms / 2 / configurations
