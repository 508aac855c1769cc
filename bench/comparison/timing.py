"""Verdicts on step times, per configuration and of all together. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.comparison import statistics
from bench.comparison.result import (
    CANNOT_TELL,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    STEP_TIME,
    TFLOPS,
    ComparisonSettings,
    QuantityChange,
    format_percent,
)
from bench.comparison.statistics import (
    LogShift,
    RegressionCriterion,
    compute_detectable_slowdown,
    compute_regression_probability,
)

DETECTION_POWER = 0.95
"""How often a detectable slowdown is found."""

TOO_FEW_RUNS_REASON = "one run on a side shows no spread, so nothing can be significant: repeat it (sweep.repeats=5)"


@dataclass(frozen=True)
class StepTimes:
    """Step times of one configuration, in seconds, one per run in the order of the runs."""

    base: tuple[float, ...]
    candidate: tuple[float, ...]
    is_exact: bool = False
    """Nothing ran, so nothing scatters: predictions."""
    is_interleaved: bool = False
    """The k-th runs of both sides were made one after the other, for every k."""


MIN_ROUNDS = 5
"""Rounds of base and candidate in turn from which on their differences are judged: of fewer the spread is hardly known,
and the runs of both sides, whose spread a drift makes larger, are taken as if they had been made in any order."""


@dataclass(frozen=True)
class TimeJudgement:
    """A shift, how significant it is among its like, and the verdict."""

    shift: LogShift
    p: float
    """Corrected for the number of comparisons."""
    level: float
    """What `p` is held to."""
    verdict: str


OVERALL_ALARM_SHARE, CONFIGURATION_ALARM_SHARE = 0.5, 0.33
"""Shares of the false alarms that all configurations together may take (an upgrade mostly changes all of them), and
that the configurations may. The rest is kept back: spreads that inform each other differ, which costs up to half as
many again."""

SINGLE_LEVEL_FACTOR, QUIET_LEVEL_FACTOR = 0.9, 1.4
"""The level of a single configuration over `ComparisonSettings.false_alarms`, and the same where its runs scatter by no
more than the threshold.

There the threshold rules out false alarms by itself, so that fewer than `Settings.false_alarms` remain at spreads up to
1.2 % (at the default threshold and five runs); 1.3 times as many are the most, near 1.8 %. Without it a slowdown of 3 %
at a spread of 1 % would be found 93 times in 100 instead of 95: no test of five against five runs that knows nothing of
their spread finds more than 94 and raises no more than 1 % of false alarms at every spread.
`tests/comparison/test_comparison_statistics.py` measures these rates.
"""


def build_criterion(configurations: int, settings: ComparisonSettings) -> RegressionCriterion:
    """What the clearest of so many configurations is held to."""
    if configurations == 1:
        return RegressionCriterion(
            settings.threshold,
            SINGLE_LEVEL_FACTOR * settings.false_alarms,
            min(QUIET_LEVEL_FACTOR * settings.false_alarms, 0.5),
        )
    level = CONFIGURATION_ALARM_SHARE * settings.false_alarms / configurations
    return RegressionCriterion(settings.threshold, level, level)


def judge_times(
    times: Sequence[StepTimes], settings: ComparisonSettings
) -> tuple[list[TimeJudgement], TimeJudgement | None]:
    """A verdict for each configuration, and one for all together (None if there are none).

    With more than one configuration a small share of `settings.false_alarms` goes to all together, and the rest to the
    configurations, with p values corrected for their number (Holm).
    """
    if not times:
        return [], None
    # A single configuration shows too little of both spreads to tell them apart.
    equal_spread = len(times) == 1 or statistics.has_equal_spread(
        [(step_times.base, step_times.candidate) for step_times in times if not step_times.is_exact]
    )
    shifts = [
        statistics.compute_shift(step_times.base, step_times.candidate, equal_spread=equal_spread)
        for step_times in times
    ]
    tested_indices = [
        index for index, step_times in enumerate(times) if shifts[index].has_spread and not step_times.is_exact
    ]
    for index, shift in zip(
        tested_indices, statistics.moderate_shifts([shifts[index] for index in tested_indices]), strict=True
    ):
        shifts[index] = shift
    p_by_direction = {
        direction: dict(
            zip(
                tested_indices,
                statistics.correct_p_values([shifts[index].compute_p_value(direction) for index in tested_indices]),
                strict=True,
            )
        )
        for direction in (1, -1)
    }
    judgements = []
    for index, (step_times, shift) in enumerate(zip(times, shifts, strict=True)):
        p = p_by_direction[1 if shift.log_change >= 0 else -1].get(index, 1.0)
        level = (
            build_criterion(1, settings).choose_level(shift.spread, shift.degrees)
            if len(times) == 1
            else CONFIGURATION_ALARM_SHARE * settings.false_alarms
        )
        verdict = (
            _decide_exact_verdict(shift, settings)
            if step_times.is_exact
            else _decide_verdict(shift, p, level, settings)
        )
        judgements.append(TimeJudgement(shift, p, level, verdict))
    if len(times) == 1:
        return judgements, judgements[0]
    usable_times = [times[index] for index in tested_indices] or times
    run_counts = {len(side) for step_times in usable_times for side in (step_times.base, step_times.candidate)}
    are_rounds = (
        all(step_times.is_interleaved for step_times in usable_times)
        and len(run_counts) == 1
        and min(run_counts) >= MIN_ROUNDS
    )
    pool_shifts = statistics.pool_paired_shifts if are_rounds else statistics.pool_shifts
    pooled_shift = pool_shifts([(step_times.base, step_times.candidate) for step_times in usable_times])
    p = pooled_shift.compute_p_value(1 if pooled_shift.log_change >= 0 else -1)
    level = OVERALL_ALARM_SHARE * settings.false_alarms
    is_exact = all(step_times.is_exact for step_times in times)
    verdict = (
        _decide_exact_verdict(pooled_shift, settings) if is_exact else _decide_verdict(pooled_shift, p, level, settings)
    )
    return judgements, TimeJudgement(pooled_shift, p, level, verdict)


def _decide_exact_verdict(shift: LogShift, settings: ComparisonSettings) -> str:
    return _choose_direction(shift) if abs(shift.change) >= settings.threshold and shift.change else NO_CHANGE


def _decide_verdict(shift: LogShift, p: float, level: float, settings: ComparisonSettings) -> str:
    if not shift.has_spread:
        return CANNOT_TELL
    if abs(shift.log_change) >= math.log1p(settings.threshold) and p <= level:
        return _choose_direction(shift)
    low, high = shift.compute_interval(settings.confidence)
    return NO_CHANGE if -settings.margin <= low and high <= settings.margin else CANNOT_TELL


def _choose_direction(shift: LogShift) -> str:
    return REGRESSION if shift.log_change > 0 else IMPROVEMENT


def compare_times(
    times: Sequence[StepTimes], settings: ComparisonSettings
) -> tuple[list[QuantityChange], QuantityChange | None]:
    """What `judge_times` says, with all numbers."""
    if not times:
        return [], None
    judgements, overall_judgement = judge_times(times, settings)
    criterion = build_criterion(len(times), settings)
    changes = [
        _build_change(step_times, judgement, criterion, settings)
        for step_times, judgement in zip(times, judgements, strict=True)
    ]
    if overall_judgement is None or len(times) == 1:
        return changes, changes[0]
    usable_times = [
        step_times for step_times, judgement in zip(times, judgements, strict=True) if judgement.shift.has_spread
    ] or times
    longest_times = [
        max((getattr(step_times, side) for step_times in usable_times), key=len) for side in ("base", "candidate")
    ]
    criterion = RegressionCriterion(settings.threshold, overall_judgement.level, overall_judgement.level)
    overall_change = _build_change(
        StepTimes(longest_times[0], longest_times[1], all(step_times.is_exact for step_times in times)),
        overall_judgement,
        criterion,
        settings,
    )
    return changes, replace(overall_change, base=None, candidate=None)


MAX_DECIDING_RUNS = 1000
"""Runs of a side beyond which nobody would go on."""


def count_deciding_runs(
    judgement: TimeJudgement, criterion: RegressionCriterion, settings: ComparisonSettings
) -> int | None:
    """Runs of each side that would probably decide it, if change and spread are what these runs show.

    That is the smallest number with which a change of this size is called 95 times in 100, or the confidence interval
    around it lies within the margin, so that it is "no change". None beyond `MAX_DECIDING_RUNS`.
    """
    log_change, spread = abs(judgement.shift.log_change), judgement.shift.spread
    counts = [*range(2, 40), *(round(40 * 1.1**power) for power in range(35) if 40 * 1.1**power <= MAX_DECIDING_RUNS)]
    for runs in counts:
        error = spread * statistics.compute_error_factor(runs, runs)
        half_width = statistics.compute_critical_value((1 - settings.confidence) / 2, 2 * runs - 2) * error
        if log_change + half_width <= math.log1p(settings.margin):
            return runs
        if log_change >= math.log1p(settings.threshold) and (
            compute_regression_probability(math.expm1(log_change), spread, runs, runs, criterion) >= DETECTION_POWER
        ):
            return runs
    return None


def _describe_deciding_runs(
    times: StepTimes, judgement: TimeJudgement, criterion: RegressionCriterion, settings: ComparisonSettings
) -> str:
    """What would decide it, in words."""
    runs = count_deciding_runs(judgement, criterion, settings)
    fewest = min(len(times.base), len(times.candidate))
    if runs is None:
        return f"not even {MAX_DECIDING_RUNS:,} runs of each side would decide it"
    if runs <= fewest:
        return "as many runs again would probably decide it"
    return f"{runs - fewest} more runs of each side would probably decide it (sweep.repeats={runs})"


def _build_change(
    times: StepTimes, judgement: TimeJudgement, criterion: RegressionCriterion, settings: ComparisonSettings
) -> QuantityChange:
    shift, is_tested = judgement.shift, judgement.shift.has_spread and not times.is_exact
    low, high = shift.compute_interval(settings.confidence) if is_tested else (None, None)
    detectable = None
    if is_tested:
        run_counts = len(times.base), len(times.candidate)
        least_detectable = compute_detectable_slowdown(
            shift.compute_error_spread(*run_counts), *run_counts, criterion, DETECTION_POWER, shift.degrees
        )
        detectable = None if math.isnan(least_detectable) else least_detectable
    return QuantityChange(
        STEP_TIME.column,
        judgement.verdict,
        _format_reason(
            judgement,
            detectable,
            _describe_deciding_runs(times, judgement, criterion, settings)
            if is_tested and judgement.verdict == CANNOT_TELL
            else "",
            is_exact=times.is_exact,
        ),
        float(np.exp(np.mean(np.log(times.base)))),
        float(np.exp(np.mean(np.log(times.candidate)))),
        len(times.base),
        len(times.candidate),
        shift.change,
        low,
        high,
        judgement.p if is_tested else None,
        shift.spread if is_tested else None,
        detectable,
    )


def _format_reason(judgement: TimeJudgement, detectable: float | None, decided_by: str, *, is_exact: bool) -> str:
    if judgement.verdict in (REGRESSION, IMPROVEMENT):
        return f"step time {format_percent(judgement.shift.change)}"
    if judgement.verdict == NO_CHANGE or is_exact:
        return ""
    if not judgement.shift.has_spread:
        return TOO_FEW_RUNS_REASON
    scatter_text = f"runs scatter by {format_percent(judgement.shift.spread, signed=False)}"
    if detectable is None:
        return f"{scatter_text}; {decided_by}"
    return (
        f"{scatter_text}: only a slowdown of {format_percent(detectable, signed=False)} would be found 95 times in "
        f"100; {decided_by}"
    )


def compare_throughput(
    time_change: QuantityChange, base: Sequence[float], candidate: Sequence[float], settings: ComparisonSettings
) -> QuantityChange:
    """TFLOPS per GPU: the inverse of the time, with its verdict, as long as a step's FLOPs are counted as before."""
    shift = statistics.compute_shift(base, candidate)
    is_tested = shift.has_spread and time_change.low is not None
    low, high = shift.compute_interval(settings.confidence) if is_tested else (None, None)
    means = [float(np.exp(np.mean(np.log(side)))) for side in (base, candidate)]
    return replace(
        time_change,
        quantity=TFLOPS.column,
        reason="",
        base=means[0],
        candidate=means[1],
        change=shift.change,
        low=low,
        high=high,
        detectable=None,
    )


# --- How small a slowdown can be found with so many runs at such a spread. Pure functions.


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
