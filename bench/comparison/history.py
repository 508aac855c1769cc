"""Values of each configuration over commits and dates, and the commits at which their level changed. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.comparison import change_points, judging, machines
from bench.comparison.change_points import Step
from bench.comparison.machines import MACHINE, SOFTWARE, Difference
from bench.comparison.pairing import by_device, unpublished
from bench.comparison.settings import Settings
from bench.comparison.words import (
    CANNOT_TELL,
    IMPROVEMENT,
    QUANTITIES,
    REGRESSION,
    RESERVED,
    TFLOPS,
    TIME,
    Quantity,
    names,
)
from bench.records import Record
from bench.records.matching import Question, identity, run_question


@dataclass(frozen=True)
class Point:
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
    machines: tuple[Difference, ...] = ()
    software: tuple[Difference, ...] = ()

    @property
    def date(self) -> str:
        """Day of the first run with the new level."""
        return self.started_at[:10]


@dataclass(frozen=True)
class Series:
    """One quantity of one configuration on one device over commits, in order of time."""

    name: str
    evidence: str
    device: str
    quantity: Quantity
    question: Question
    points: tuple[Point, ...]
    change_points: tuple[ChangePoint, ...] = ()


def history(records: Sequence[Record], settings: Settings | None = None) -> list[Series]:
    """The history of every configuration that was run at more than one commit, date or set of versions.

    Parameters
    ----------
    records: sequence of records
        Every attempt (`bench.records.read_attempts`): a run that was forced again with another commit is a new attempt.
    settings: Settings
        Thresholds as in `compare`; `false_alarms` is the probability that any of the series of times that are all
        flat is split.
    """
    settings = settings or Settings()
    found: list[Series] = []
    groups = _groups(records)
    of_kind = {kind: [group for group in groups if group[0] == kind] for kind in dict.fromkeys(g[0] for g in groups)}
    for kind, members in of_kind.items():
        titles = names([rows[-1] for _, _, _, rows in members], [question for _, question, _, _ in members])
        for name, (_, question, device, rows) in zip(titles, members, strict=True):
            points = _points(rows)
            if len(points) > 1:
                series = [Series(name, kind, device, each, question, _valued(points, each)) for each in QUANTITIES]
                found += [each for each in series if any(point.value is not None for point in each.points)]
    tested = sum(series.quantity == TIME and series.evidence != "predicted" for series in found)
    level = settings.false_alarms / max(tested, 1)
    return [replace(series, change_points=_change_points(series, level, settings)) for series in found]


def _groups(records: Sequence[Record]) -> list[tuple[str, Question, str, list[Record]]]:
    """Rows that are results, by kind of evidence, configuration and device, in order of time."""
    same: dict[tuple[str, str], list[Record]] = {}
    for row in judging.judged(unpublished(records)):
        same.setdefault((row["evidence"], identity(run_question(row) or {})), []).append(row)
    return [
        (kind, run_question(rows[0]) or {}, device, here)
        for (kind, _), rows in same.items()
        for device, here in by_device(rows).items()
    ]


def _points(rows: Sequence[Record]) -> list[list[Record]]:
    """Rows of one commit, one set of versions and one day, in order of their first run."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for row in rows:
        names_ = ("git_sha", "git_clean", "torch_version", "predictor")
        found.setdefault((*(row.get(name) for name in names_), str(row.get("started_at"))[:10]), []).append(row)
    return list(found.values())


def _valued(points: Sequence[Sequence[Record]], quantity: Quantity) -> tuple[Point, ...]:
    found = []
    for rows in points:
        ok = [row for row in rows if row["status"] == "ok" and row.get(quantity.column)]
        timed = quantity in (TIME, TFLOPS)
        values = [float(row[quantity.column]) for row in ok if not (timed and row.get("degraded"))]
        slowed = [float(row[quantity.column]) for row in ok if timed and row.get("degraded")]
        first = rows[0]
        found.append(
            Point(
                first.get("git_sha"),
                first.get("git_clean"),
                first.get("started_at") or "",
                _middle(values, timed),
                min(values, default=None),
                max(values, default=None),
                len(values),
                len(slowed),
                dict(Counter(row["status"] for row in rows)),
                _middle(slowed, timed),
                tuple(rows),
            )
        )
    return tuple(found)


def _middle(values: Sequence[float], timed: bool) -> float | None:
    if not values:
        return None
    return float(np.exp(np.mean(np.log(values)))) if timed else float(np.median(values))


def _change_points(series: Series, level: float, settings: Settings) -> tuple[ChangePoint, ...]:
    """Changes of level, and of status where a configuration began to fail or to work."""
    known = [index for index, point in enumerate(series.points) if point.value is not None]
    values = [series.points[index].value or 0.0 for index in known]
    steps: list[Step] = []
    if series.quantity in (TIME, TFLOPS) and series.evidence != "predicted":
        steps = change_points.steps(values, level, settings.threshold)
    elif len(values) > 1:
        thresholds = {TIME: settings.threshold, TFLOPS: settings.threshold, RESERVED: settings.reserved_threshold}
        steps = change_points.exact_steps(values, thresholds.get(series.quantity, settings.memory_threshold))
    found = []
    for step in steps:
        worse = step.change * series.quantity.worse > 0
        before, after = known[step.index - 1], known[step.index]
        found.append(_point(series, before, after, step.before, step.after, worse, step.change, step.p))
    for index in range(1, len(series.points)):
        old, new = series.points[index - 1].status, series.points[index].status
        if (old == "ok") != (new == "ok"):
            found.append(_point(series, index - 1, index, old, new, old == "ok"))
    return tuple(sorted(found, key=lambda change: change.index))


def _point(
    series: Series,
    before: int,
    after: int,
    old: float | str,
    new: float | str,
    worse: bool,
    change: float | None = None,
    p: float | None = None,
) -> ChangePoint:
    first, last = series.points[after], series.points[before]
    other = tuple(machines.differences(last.rows, first.rows, MACHINE))
    verdict = CANNOT_TELL if other else REGRESSION if worse else IMPROVEMENT
    software = tuple(machines.differences(last.rows, first.rows, SOFTWARE))
    return ChangePoint(
        after, first.git_sha, first.commit, first.started_at, last.commit, old, new, change, p, verdict, other, software
    )
