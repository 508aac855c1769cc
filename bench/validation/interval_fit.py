"""Factors of intervals from residuals of published rows, such that rows of a source or device left out lie within them.

Conformal prediction by groups: a residual is the logarithm of true against predicted, a group one source on one device.
Rows of a group share what makes them miss, so a new source is like a new group, not like more rows: an interval holds,
on either side, the quantile of all residuals in which each group counts as much as any other, whatever its rows (pooled
in groups as by Dunn, Wasserman and Ramdas, "Distribution-free prediction sets for two-layer hierarchical models", 2018,
arXiv:1809.07441). A margin is added on both sides, the least of `MARGINS` with which, if each source in turn (for
devices without training rows: each device in turn, too) takes no part, `TARGET_COVERAGE` of the rows left out lie
within the interval of the others, and `SOURCE_COVERAGE` of the rows of each source that has enough of them, but for
one such source in `SOURCES_PER_MISS`. Of the intervals that come of `SIDE_LEVELS` the narrowest is taken.

Layouts of several kinds of parallelism have an interval of their own for step time. None for memory: their rows are
of software that keeps other things than torch does, and say nothing of how well torch's memory is predicted.

Rows of unknown sources are further off than those whose software somebody looked up. How much further, the same rows
show when they are read once more as if nobody had (`forget_source`): their residuals, of time and of memory, are those
of the classes of unknown sources, which are no narrower than those of rough rows. Memory of all kinds is one class
there. A margin is enough with which `TARGET_COVERAGE` lie within in the mean of all sources left out, and
`SOURCE_COVERAGE` of all their rows.

Steps in which the allocator may have to retry are left out: these have an interval of their own, from no retries to as
many as are likely.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.prediction.intervals import (
    ALLOCATED,
    COMPLETE,
    DERIVED,
    INTERVAL_METRICS,
    LAYOUTS,
    MICROBENCHMARKS,
    ROUGH,
    STEP_TIME,
    TRAINING_ROWS,
    UNKNOWN,
    UNKNOWN_LAYOUTS,
)
from bench.records.published import PublishedLine
from bench.validation.metrics import BETWEEN_STEPS, SPEED
from bench.validation.score_summaries import group_by, pick_configurations
from bench.validation.scores import INTERVAL_METRICS as METRIC_OF_KIND
from bench.validation.scores import Score

TARGET_COVERAGE = 0.95
"""Share of all rows of sources, or devices, left out that the margin must come to."""

SOURCE_COVERAGE, SOURCES_PER_MISS = 0.93, 10
"""Share of the rows of one source, or device, left out that is asked for (of unknown sources: of all of them
together), and how many sources there are for each that need not come to it."""

MIN_SOURCE_ROWS = 15
"""Of a source that is asked for it: of fewer, one row that is outside is more than the share that may be."""

SIDE_LEVELS = (0.975, 0.95, 0.9)
"""Quantiles of residuals on each side, to try."""

MIN_HALF_WIDTH = 0.005
"""Of any interval, as a logarithm: what rounding in print leaves."""

MARGINS = [0.005 * step for step in range(201)]
"""To try, as logarithms."""

MAX_RETRY_PROBABILITY = 0.025
"""Of a step whose residual counts."""

MIN_RESIDUALS, MIN_GROUPS = 8, 2
"""Of a class whose margin can be fitted."""

SINGLE_GROUP_FACTOR = 1.5
"""Assumed: half-widths of a class with fewer, over what it shows."""

DERIVED_FACTOR = 1.5
"""Assumed: half-widths on devices whose speed is derived, over those of devices known by microbenchmarks alone."""


@dataclass(frozen=True)
class Residual:
    """How far the truth is from one prediction."""

    source: str
    device: str
    log_ratio: float
    """Natural logarithm of true against predicted, of step time or bytes."""
    row_class: str = COMPLETE
    """COMPLETE or ROUGH."""
    has_derived_time: bool = False
    """It is of time, on a device whose speed is derived: it says nothing of devices with training rows."""


@dataclass(frozen=True)
class FittedInterval:
    """An interval of one class, and how it holds on what took no part in it."""

    low: float
    high: float
    """Factors of the prediction."""
    residuals: int
    groups: int
    margin: float
    """Added on both sides, a logarithm."""
    coverage_by_source: float | None
    coverage_by_device: float | None
    """Share of rows within it when their source, or device, took no part; None where there is only one."""
    basis: str
    """``fitted``, or what it was taken from."""

    def to_plain(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in self.__dict__.items()}


def list_residuals(scores: Iterable[Score], metric: str, row_class: str) -> list[Residual]:
    """Residuals of one metric and class of rows, each configuration once; none of what its authors call noisy. Of time,
    those on devices whose speed is derived count for as much less as their intervals are wider."""
    return [
        _build_residual(score, has_derived_time=metric == STEP_TIME and score.device_class == DERIVED)
        for score in pick_configurations(scores)
        if score.is_counted
        and score.kind != BETWEEN_STEPS
        and METRIC_OF_KIND[score.kind] == metric
        and name_row_class(score) == row_class
        and not score.reading.is_noisy
        and not (score.kind == SPEED and score.retry_probability > MAX_RETRY_PROBABILITY)
    ]


def _build_residual(score: Score, *, has_derived_time: bool) -> Residual:
    log_ratio = score.log_ratio / DERIVED_FACTOR if has_derived_time else score.log_ratio
    return Residual(score.reading.source, score.hardware, log_ratio, has_derived_time=has_derived_time)


def forget_source(line: PublishedLine) -> PublishedLine:
    """The row as a table has it whose software nobody has looked up; its group among residuals stays its own."""
    return {**line, "source_key": f"{line['source_key']}, forgotten", "torch_version": ""}


def name_row_class(score: Score) -> str:
    """What rows are fitted together: layouts whatever was stated of them, else as much as was stated and measured."""
    if score.reading.assumed_class == UNKNOWN:
        return UNKNOWN_LAYOUTS if score.is_layout else UNKNOWN
    if score.is_layout:
        return LAYOUTS
    return COMPLETE if score.reading.is_complete and (score.kind != SPEED or score.is_time_known) else ROUGH


def fit_interval(
    residuals: Sequence[Residual], *, is_device_left_out: bool, is_covered: CoverageTest | None = None
) -> FittedInterval:
    """The interval of at least one residual. Of a single source nothing can be left out: it gets the first level.

    Parameters
    ----------
    is_covered: callable, optional
        Whether a margin is enough; None for `_is_covered`.
    """
    levels = SIDE_LEVELS if len({residual.source for residual in residuals}) > 1 else SIDE_LEVELS[:1]
    fitted = [_fit_level(residuals, level, is_device_left_out, is_covered or _is_covered) for level in levels]
    sufficient = [interval for interval in fitted if interval.basis == FITTED]
    return min(sufficient or fitted[:1], key=lambda interval: interval.high / interval.low)


def _fit_level(
    residuals: Sequence[Residual], level: float, is_device_left_out: bool, is_covered: CoverageTest
) -> FittedInterval:
    by_source = _list_held_out(residuals, level, lambda residual: residual.source)
    by_device = _list_held_out(residuals, level, lambda residual: residual.device)
    held_out = [by_source, by_device] if is_device_left_out else [by_source]
    sufficient = next((margin for margin in MARGINS if all(is_covered(rows, margin) for rows in held_out)), None)
    margin = MARGINS[-1] if sufficient is None else sufficient
    low, high = _compute_quantiles(residuals, level)
    return FittedInterval(
        low=math.exp(-low - margin),
        high=math.exp(high + margin),
        residuals=len(residuals),
        groups=len({(residual.source, residual.device) for residual in residuals}),
        margin=margin,
        coverage_by_source=_compute_coverage(by_source, margin),
        coverage_by_device=_compute_coverage(by_device, margin),
        basis=FITTED if sufficient is not None else f"{FITTED}, the margin at its limit",
    )


FITTED = "fitted"

HeldOut = dict[str, list[tuple[float, float, float]]]
"""By what is left out, of its rows: residual, and the quantiles below and above of those that took part."""

CoverageTest = Callable[[HeldOut, float], bool]
"""Whether enough of the rows lie within their quantiles and a margin."""


def _list_held_out(residuals: Sequence[Residual], level: float, get_name: Callable[[Residual], str]) -> HeldOut:
    held_out: HeldOut = {}
    for name, left_out in group_by(residuals, get_name).items():
        rest = [residual for residual in residuals if get_name(residual) != name]
        if rest:
            low, high = _compute_quantiles(rest, level)
            held_out[name] = [(residual.log_ratio, low, high) for residual in left_out]
    return held_out


def _is_covered(held_out: HeldOut, margin: float) -> bool:
    coverage = _compute_coverage(held_out, margin)
    if coverage is None:
        return True
    sources = [rows for rows in held_out.values() if len(rows) >= MIN_SOURCE_ROWS]
    num_missing = sum(_count_within(rows, margin) < SOURCE_COVERAGE * len(rows) for rows in sources)
    return coverage >= TARGET_COVERAGE and num_missing <= len(sources) // SOURCES_PER_MISS


def is_covered_on_average(held_out: HeldOut, margin: float) -> bool:
    """Each source, or device, counts as much as any other: of some tables that nobody has looked up nearly all rows
    miss for one and the same reason. Of all rows together `SOURCE_COVERAGE` is asked for."""
    shares = [_count_within(rows, margin) / len(rows) for rows in held_out.values()]
    coverage = _compute_coverage(held_out, margin)
    return coverage is None or (fmean(shares) >= TARGET_COVERAGE and coverage >= SOURCE_COVERAGE)


def _compute_coverage(held_out: HeldOut, margin: float) -> float | None:
    """Of all rows; None where there are none."""
    num_rows = sum(map(len, held_out.values()))
    return sum(_count_within(rows, margin) for rows in held_out.values()) / num_rows if num_rows else None


def _count_within(rows: Sequence[tuple[float, float, float]], margin: float) -> int:
    return sum(-low - margin <= ratio <= high + margin for ratio, low, high in rows)


def _compute_quantiles(residuals: Sequence[Residual], level: float) -> tuple[float, float]:
    """Half-widths below and above, as logarithms."""
    groups = group_by(residuals, lambda residual: f"{residual.source} {residual.device}").values()
    low, high = (
        _compute_quantile([(sign * item.log_ratio, 1 / len(group)) for group in groups for item in group], level)
        for sign in (-1, 1)
    )
    return max(MIN_HALF_WIDTH, low), max(MIN_HALF_WIDTH, high)


def _compute_quantile(weighted_values: Sequence[tuple[float, float]], level: float) -> float:
    """The smallest of the values that a share `level` of the weight does not exceed."""
    ascending = sorted(weighted_values)
    weights = list(itertools.accumulate(weight for _, weight in ascending))
    return ascending[min(bisect.bisect_left(weights, level * weights[-1] - 1e-9), len(ascending) - 1)][0]


def fit_intervals(
    scores: Sequence[Score], forgotten: Sequence[Score], measured: Mapping[str, Sequence[Residual]]
) -> dict[str, Any]:
    """What ``intervals.json`` holds: factors by metric, class of device and class of row, and how they were chosen.

    Parameters
    ----------
    forgotten: sequence of Score
        Of the rows after `forget_source`.
    measured: mapping
        By metric, residuals of the suite's own rows.
    """
    trained_devices = {score.hardware for score in scores if score.kind == SPEED and score.reading.is_complete}
    factors = {
        metric: _fit_metric(scores, metric, measured.get(metric, ()), trained_devices) for metric in INTERVAL_METRICS
    }
    _borrow_from_other_memory(factors)
    _add_unknown_sources(factors, forgotten)
    return {
        "target coverage": TARGET_COVERAGE,
        "devices with training rows": sorted(trained_devices),
        "factors": {
            metric: {
                device_class: {name: interval.to_plain() for name, interval in rows.items()}
                for device_class, rows in classes.items()
            }
            for metric, classes in factors.items()
        },
    }


MEMORY_METRICS = tuple(metric for metric in INTERVAL_METRICS if metric != STEP_TIME)


def _borrow_from_other_memory(factors: Mapping[str, dict[str, dict[str, FittedInterval]]]) -> None:
    """Memory of which too few sources show how far off it is is no more certain than that of which enough do."""
    for device_class, name in itertools.product((TRAINING_ROWS, MICROBENCHMARKS, DERIVED), (COMPLETE, ROUGH)):
        known = [
            factors[metric][device_class][name]
            for metric in MEMORY_METRICS
            if factors[metric][TRAINING_ROWS][name].basis == FITTED
        ]
        for metric in MEMORY_METRICS:
            interval = factors[metric][device_class][name]
            if known and factors[metric][TRAINING_ROWS][name].basis != FITTED:
                factors[metric][device_class][name] = dataclasses.replace(
                    interval,
                    low=min(interval.low, *(other.low for other in known)),
                    high=max(interval.high, *(other.high for other in known)),
                    basis=f"{interval.basis}, and no less than other memory",
                )


def _fit_metric(
    scores: Sequence[Score], metric: str, measured: Sequence[Residual], trained_devices: Set[str]
) -> dict[str, dict[str, FittedInterval]]:
    row_classes = (COMPLETE, ROUGH, *([LAYOUTS] if metric == STEP_TIME else []))
    residuals = {name: list_residuals(scores, metric, name) for name in row_classes}
    classes: dict[str, dict[str, FittedInterval]] = {}
    for device_class, is_device_left_out in ((TRAINING_ROWS, False), (MICROBENCHMARKS, True)):
        own = [residual for residual in measured if is_device_left_out or residual.device in trained_devices]
        class_residuals = {
            name: [
                *(residual for residual in rows if is_device_left_out or not residual.has_derived_time),
                *(residual for residual in own if residual.row_class == name),
            ]
            for name, rows in residuals.items()
        }
        classes[device_class] = _fit_row_classes(class_residuals, is_device_left_out=is_device_left_out)
    classes[MICROBENCHMARKS] = {
        name: _widen_to(interval, classes[TRAINING_ROWS][name]) for name, interval in classes[MICROBENCHMARKS].items()
    }
    classes[DERIVED] = {
        name: _widen(interval, DERIVED_FACTOR, f"assumed: {DERIVED_FACTOR} times {MICROBENCHMARKS}")
        for name, interval in classes[MICROBENCHMARKS].items()
    }
    if metric == ALLOCATED:
        for rows in classes.values():
            for name, interval in rows.items():
                rows[name] = keep_runs_possible(interval, scores, name)
    return classes


def _add_unknown_sources(
    factors: Mapping[str, dict[str, dict[str, FittedInterval]]], forgotten: Sequence[Score]
) -> None:
    """Add the classes of unknown sources, each no narrower than what stands for it where the source is known."""
    residuals = {
        (metric, name): list_residuals(forgotten, metric, name)
        for metric in INTERVAL_METRICS
        for name in (UNKNOWN, UNKNOWN_LAYOUTS)
    }
    memory = [residual for (metric, _), rows in residuals.items() if metric in MEMORY_METRICS for residual in rows]
    for metric, classes in factors.items():
        is_memory = metric in MEMORY_METRICS
        for name, known_name in ((UNKNOWN, ROUGH), (UNKNOWN_LAYOUTS, LAYOUTS))[: 1 if is_memory else 2]:
            known = {device_class: rows.get(known_name, rows[ROUGH]) for device_class, rows in classes.items()}
            rows = memory if is_memory else residuals[metric, name]
            trained, timed = (
                _widen_to(_fit_unknown(rows, known[device_class], is_device_left_out=value), known[device_class])
                for device_class, value in ((TRAINING_ROWS, False), (MICROBENCHMARKS, not is_memory))
            )
            timed = derived = _widen_to(timed, trained)
            if not is_memory:  # which no device's speed has a part in
                derived = _widen(timed, DERIVED_FACTOR, f"assumed: {DERIVED_FACTOR} times {MICROBENCHMARKS}")
            for device_class, interval in ((TRAINING_ROWS, trained), (MICROBENCHMARKS, timed), (DERIVED, derived)):
                classes[device_class][name] = _widen_to(interval, known[device_class])


def _are_too_few(residuals: Sequence[Residual]) -> bool:
    """To fit the margin of a class."""
    num_groups = len({(residual.source, residual.device) for residual in residuals})
    return len(residuals) < MIN_RESIDUALS or num_groups < MIN_GROUPS


def _fit_unknown(residuals: Sequence[Residual], known: FittedInterval, *, is_device_left_out: bool) -> FittedInterval:
    if _are_too_few(residuals):
        return _widen(known, SINGLE_GROUP_FACTOR, f"assumed: {SINGLE_GROUP_FACTOR} times what known sources show")
    return fit_interval(residuals, is_device_left_out=is_device_left_out, is_covered=is_covered_on_average)


def _fit_row_classes(
    residuals: Mapping[str, Sequence[Residual]], *, is_device_left_out: bool
) -> dict[str, FittedInterval]:
    fitted: dict[str, FittedInterval] = {}
    for name, other_name in ((COMPLETE, ROUGH), (ROUGH, COMPLETE)):
        rows = residuals[name] or residuals[other_name]
        groups = {(residual.source, residual.device) for residual in rows}
        fitted[name] = fit_interval(rows, is_device_left_out=is_device_left_out)
        if rows is not residuals[name] or len(rows) < MIN_RESIDUALS or len(groups) < MIN_GROUPS:
            basis = f"assumed: {SINGLE_GROUP_FACTOR} times what {len(rows)} rows of {len(groups)} group(s) show"
            fitted[name] = _widen(fitted[name], SINGLE_GROUP_FACTOR, basis)
    complete, rough = fitted[COMPLETE], fitted[ROUGH]
    fitted[ROUGH] = _widen_to(rough, complete)
    layouts = _fit_layouts(residuals.get(LAYOUTS, ()), complete, is_device_left_out=is_device_left_out)
    return fitted if layouts is None else fitted | {LAYOUTS: layouts}


def _fit_layouts(
    residuals: Sequence[Residual], complete: FittedInterval, *, is_device_left_out: bool
) -> FittedInterval | None:
    """No narrower than that of complete rows; None where there are too few."""
    if _are_too_few(residuals):
        return None
    fitted = fit_interval(residuals, is_device_left_out=is_device_left_out)
    return _widen_to(fitted, complete)


def _widen_to(interval: FittedInterval, other: FittedInterval) -> FittedInterval:
    """No narrower than another one."""
    return dataclasses.replace(interval, low=min(interval.low, other.low), high=max(interval.high, other.high))


def _widen(interval: FittedInterval, factor: float, basis: str) -> FittedInterval:
    return FittedInterval(
        **{
            **interval.__dict__,
            "low": interval.low**factor,
            "high": interval.high**factor,
            "basis": basis,
        }
    )


def keep_runs_possible(interval: FittedInterval, scores: Sequence[Score], row_class: str) -> FittedInterval:
    """No run that was published as running is said not to fit, a layout neither: its least memory is at most the
    capacity."""
    limits = [
        1 / score.fullness
        for score in scores
        if score.quantity.ran and score.fullness and score.verdict and _name_verdict_class(score) == row_class
    ]
    low = min([interval.low, *limits])
    return FittedInterval(**{**interval.__dict__, "low": low})


def _name_verdict_class(score: Score) -> str:
    """Whose interval says whether a run fits."""
    return COMPLETE if score.reading.is_complete else ROUGH


def write_intervals(intervals: Mapping[str, Any], path: Path) -> None:
    """The file, with a line per class."""
    path.write_text(json.dumps(intervals, indent=1) + "\n", encoding="utf-8")
