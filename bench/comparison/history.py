"""Values of each configuration over commits and dates, and the commits at which their level changed. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import ruptures
from scipy import stats

from bench.comparison import hosts, status_and_memory
from bench.comparison.hosts import MACHINE_FACTS, SOFTWARE_FACTS, EnvironmentDifference
from bench.comparison.pairing import group_by_device, select_matchable_rows
from bench.comparison.result import (
    CANNOT_TELL,
    IMPROVEMENT,
    QUANTITIES,
    REGRESSION,
    RESERVED,
    STEP_TIME,
    TFLOPS,
    ComparedQuantity,
    ComparisonSettings,
    name_configurations,
)
from bench.records import Record
from bench.records.matching import ConfigKey, build_run_key, encode_config_key


@dataclass(frozen=True)
class LevelChange:
    """A change of level before the value number `index`."""

    index: int
    before: float
    after: float
    """Geometric mean of the values up to the neighbouring changes."""
    p: float

    @property
    def change(self) -> float:
        """After over before, less 1."""
        return self.after / self.before - 1


def find_level_changes(values: Sequence[float], level: float, threshold: float) -> list[LevelChange]:
    """Changes of level in positive values that scatter.

    Parameters
    ----------
    level: float
        Probability that a flat series, with independent normal noise in its logarithm, is split anywhere.
    threshold: float
        Smallest change that counts, a fraction.
    """
    logs = np.log(np.asarray(values, dtype=float))
    p_by_index = dict(_find_splits(logs, 0, level))
    while True:
        level_changes = _build_level_changes(logs, p_by_index)
        small_changes = [
            change for change in level_changes if abs(math.log(change.after / change.before)) < math.log1p(threshold)
        ]
        if not small_changes:
            return level_changes
        del p_by_index[min(small_changes, key=lambda change: abs(math.log(change.after / change.before))).index]


def find_exact_level_changes(values: Sequence[float], threshold: float) -> list[LevelChange]:
    """Changes of level in values that do not scatter (memory, predictions): whatever leaves the range of a level."""
    p_by_index: dict[int, float] = {}
    start = 0
    for index in range(1, len(values)):
        level_values = values[start:index]
        if values[index] > max(level_values) * (1 + threshold) or values[index] < min(level_values) / (1 + threshold):
            p_by_index[index], start = 0.0, index
    return _build_level_changes(np.log(np.asarray(values, dtype=float)), p_by_index)


def _compute_min_segment(count: int) -> int:
    """Values at each level, of so many in all: the longer a series, the more often two outliers are neighbours."""
    return 2 + (count >= 25) + (count >= 75)


def _find_splits(logs: np.ndarray, offset: int, level: float) -> list[tuple[int, float]]:
    """Places (counted from `offset`) of significant changes with their p values."""
    min_segment = _compute_min_segment(len(logs))
    for num_changes in (1, 2):  # two at once only where there is not one: what comes and goes
        if len(logs) < max(min_segment * (num_changes + 1), num_changes + 3):
            return []
        search = ruptures.KernelCPD(kernel="linear", min_size=min_segment).fit(logs.reshape(-1, 1))
        split_indices = search.predict(n_bkps=num_changes)[:-1]
        p = min(
            1.0, 2 * _count_divisions(len(logs), num_changes, min_segment) * _compute_p_value(logs, split_indices)
        )  # 2: one change, or two
        if p <= level:
            break
    else:
        return []
    edges = [0, *split_indices, len(logs)]
    splits = [(offset + index, p) for index in split_indices]
    for start, end in pairwise(edges):
        splits += _find_splits(logs[start:end], offset + start, level)
    return sorted(splits)


def _count_divisions(count: int, num_changes: int, min_segment: int) -> int:
    """Ways to divide so many values into parts of at min_segment `min_segment`."""
    return math.comb(count - min_segment * (num_changes + 1) + num_changes, num_changes)


def _compute_p_value(logs: np.ndarray, split_indices: Sequence[int]) -> float:
    """F test of several levels against one, at given places."""
    segments = np.split(logs, split_indices)
    variation_within = sum(float(((segment - segment.mean()) ** 2).sum()) for segment in segments)
    variation_between = float(((logs - logs.mean()) ** 2).sum()) - variation_within
    degrees = len(logs) - len(segments)
    if variation_within <= 1e-24 * len(logs):
        return 0.0 if variation_between > 1e-18 * len(logs) else 1.0
    return float(
        stats.f.sf(variation_between / len(split_indices) / (variation_within / degrees), len(split_indices), degrees)
    )


def _build_level_changes(logs: np.ndarray, p_by_index: dict[int, float]) -> list[LevelChange]:
    edges = [0, *sorted(p_by_index), len(logs)]
    means = [math.exp(float(logs[start:end].mean())) for start, end in pairwise(edges)]
    return [LevelChange(edges[i], means[i - 1], means[i], p_by_index[edges[i]]) for i in range(1, len(edges) - 1)]


# --- Values of each configuration over commits and dates, and the commits at which their level changed. Pure functions.


@dataclass(frozen=True)
class HistoryPoint:
    """The runs of one configuration with one commit and one set of versions, on one day."""

    git_sha: str | None
    clean: bool | None
    """Whether the code was as in the commit."""
    started_at: str
    """Of the first run, ISO 8601."""
    value: float | None
    """Geometric mean of a time, median of memory; None if no run has one that counts."""
    low: float | None
    high: float | None
    """Smallest and largest value of the runs."""
    runs: int
    """Runs whose value counts."""
    degraded: int
    """Runs that were degraded: their time does not count."""
    statuses: dict[str, int]
    """How many runs ended how."""
    degraded_value: float | None = None
    """Mean of the degraded runs, to be marked and not believed."""
    rows: tuple[Record, ...] = field(default=(), repr=False, compare=False)

    @property
    def date(self) -> str:
        """Day of the first run."""
        return self.started_at[:10]

    @property
    def commit(self) -> str:
        """The commit in short; a plus where the code was not as committed."""
        return "no commit" if self.git_sha is None else self.git_sha[:7] + ("+" if self.clean is False else "")

    @property
    def status(self) -> str:
        """``ok`` if any run ended well, else what most ended with."""
        return "ok" if self.statuses.get("ok") else max(self.statuses, key=lambda name: self.statuses[name])


@dataclass(frozen=True)
class ChangePoint:
    """A commit at which a level changed."""

    index: int
    """Of the first point with the new level."""
    git_sha: str | None
    commit: str
    """In short, as the point says it."""
    started_at: str
    previous: str
    """The last commit with the old level, in short: what lies between the two was not run."""
    before: float | str
    after: float | str
    """Levels, or statuses."""
    change: float | None
    """after / before - 1; None for a status."""
    p: float | None
    verdict: str
    """regression, improvement, or cannot tell where the machine changed at the same point."""
    machines: tuple[EnvironmentDifference, ...] = ()
    software: tuple[EnvironmentDifference, ...] = ()

    @property
    def date(self) -> str:
        """Day of the first run with the new level."""
        return self.started_at[:10]


@dataclass(frozen=True)
class HistorySeries:
    """One quantity of one configuration on one device over commits, in order of time."""

    name: str
    evidence: str
    device: str
    quantity: ComparedQuantity
    question: ConfigKey
    points: tuple[HistoryPoint, ...]
    change_points: tuple[ChangePoint, ...] = ()


def build_histories(records: Sequence[Record], settings: ComparisonSettings | None = None) -> list[HistorySeries]:
    """The history of every configuration that was run at more than one commit, date or set of versions.

    Parameters
    ----------
    records: sequence of records
        Every attempt (`bench.records.read_all_attempts`): a run that was forced again with another commit is a new
        attempt.
    settings: Settings
        Thresholds as in `compare_records`; `false_alarms` is the probability that any of the series of times that are
        all flat is split.
    """
    settings = settings or ComparisonSettings()
    all_series: list[HistorySeries] = []
    groups = _group_rows(records)
    groups_by_evidence = {
        evidence: [group for group in groups if group[0] == evidence]
        for evidence in dict.fromkeys(group[0] for group in groups)
    }
    for evidence, members in groups_by_evidence.items():
        titles = name_configurations(
            [rows[-1] for _, _, _, rows in members], [question for _, question, _, _ in members]
        )
        for name, (_, question, device, rows) in zip(titles, members, strict=True):
            points = _group_into_points(rows)
            if len(points) > 1:
                quantity_series = [
                    HistorySeries(name, evidence, device, quantity, question, _build_points(points, quantity))
                    for quantity in QUANTITIES
                ]
                all_series += [
                    series for series in quantity_series if any(point.value is not None for point in series.points)
                ]
    num_tested = sum(series.quantity == STEP_TIME and series.evidence != "predicted" for series in all_series)
    significance = settings.false_alarms / max(num_tested, 1)
    return [replace(series, change_points=_find_change_points(series, significance, settings)) for series in all_series]


def _group_rows(records: Sequence[Record]) -> list[tuple[str, ConfigKey, str, list[Record]]]:
    """Rows that are results, by kind of evidence, configuration and device, in order of time."""
    rows_by_question: dict[tuple[str, str], list[Record]] = {}
    for row in status_and_memory.select_results(select_matchable_rows(records)):
        rows_by_question.setdefault((row["evidence"], encode_config_key(build_run_key(row) or {})), []).append(row)
    return [
        (evidence, build_run_key(rows[0]) or {}, device, device_rows)
        for (evidence, _), rows in rows_by_question.items()
        for device, device_rows in group_by_device(rows).items()
    ]


def _group_into_points(rows: Sequence[Record]) -> list[list[Record]]:
    """Rows of one commit, one set of versions and one day, in order of their first run."""
    rows_by_point: dict[tuple[object, ...], list[Record]] = {}
    for row in rows:
        point_columns = ("git_sha", "git_clean", "torch_version", "predictor")
        rows_by_point.setdefault(
            (*(row.get(name) for name in point_columns), str(row.get("started_at"))[:10]), []
        ).append(row)
    return list(rows_by_point.values())


def _build_points(point_rows: Sequence[Sequence[Record]], quantity: ComparedQuantity) -> tuple[HistoryPoint, ...]:
    points = []
    for rows in point_rows:
        ok_rows = [row for row in rows if row["status"] == "ok" and row.get(quantity.column)]
        is_timed = quantity in (STEP_TIME, TFLOPS)
        values = [float(row[quantity.column]) for row in ok_rows if not (is_timed and row.get("degraded"))]
        degraded_values = [float(row[quantity.column]) for row in ok_rows if is_timed and row.get("degraded")]
        first_row = rows[0]
        points.append(
            HistoryPoint(
                first_row.get("git_sha"),
                first_row.get("git_clean"),
                first_row.get("started_at") or "",
                _compute_mean_or_median(values, is_timed),
                min(values, default=None),
                max(values, default=None),
                len(values),
                len(degraded_values),
                dict(Counter(row["status"] for row in rows)),
                _compute_mean_or_median(degraded_values, is_timed),
                tuple(rows),
            )
        )
    return tuple(points)


def _compute_mean_or_median(values: Sequence[float], is_timed: bool) -> float | None:
    if not values:
        return None
    return float(np.exp(np.mean(np.log(values)))) if is_timed else float(np.median(values))


def _find_change_points(
    series: HistorySeries, significance: float, settings: ComparisonSettings
) -> tuple[ChangePoint, ...]:
    """Changes of level, and of status where a configuration began to fail or to work."""
    known_indices = [index for index, point in enumerate(series.points) if point.value is not None]
    values = [series.points[index].value or 0.0 for index in known_indices]
    level_changes: list[LevelChange] = []
    if series.quantity in (STEP_TIME, TFLOPS) and series.evidence != "predicted":
        level_changes = find_level_changes(values, significance, settings.threshold)
    elif len(values) > 1:
        thresholds = {STEP_TIME: settings.threshold, TFLOPS: settings.threshold, RESERVED: settings.reserved_threshold}
        level_changes = find_exact_level_changes(values, thresholds.get(series.quantity, settings.memory_threshold))
    changes = []
    for level_change in level_changes:
        is_worse = level_change.change * series.quantity.worse_direction > 0
        before_index, after_index = known_indices[level_change.index - 1], known_indices[level_change.index]
        changes.append(
            _build_change_point(
                series,
                before_index,
                after_index,
                level_change.before,
                level_change.after,
                is_worse,
                level_change.change,
                level_change.p,
            )
        )
    for index in range(1, len(series.points)):
        old_status, new_status = series.points[index - 1].status, series.points[index].status
        if (old_status == "ok") != (new_status == "ok"):
            changes.append(_build_change_point(series, index - 1, index, old_status, new_status, old_status == "ok"))
    return tuple(sorted(changes, key=lambda change: change.index))


def _build_change_point(
    series: HistorySeries,
    before_index: int,
    after_index: int,
    old_level: float | str,
    new_level: float | str,
    is_worse: bool,
    change: float | None = None,
    p: float | None = None,
) -> ChangePoint:
    new_point, old_point = series.points[after_index], series.points[before_index]
    machine_differences = tuple(hosts.find_differences(old_point.rows, new_point.rows, MACHINE_FACTS))
    verdict = CANNOT_TELL if machine_differences else REGRESSION if is_worse else IMPROVEMENT
    software_differences = tuple(hosts.find_differences(old_point.rows, new_point.rows, SOFTWARE_FACTS))
    return ChangePoint(
        after_index,
        new_point.git_sha,
        new_point.commit,
        new_point.started_at,
        old_point.commit,
        old_level,
        new_level,
        change,
        p,
        verdict,
        machine_differences,
        software_differences,
    )
