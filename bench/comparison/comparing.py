"""Base against candidate: every configuration judged, and all of them together. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.comparison import judging, machines, remarks, timing
from bench.comparison.machines import MACHINE, SOFTWARE, Difference
from bench.comparison.pairing import Pair, pairs
from bench.comparison.result import Change, Comparison, Overall, Row, Unmatched, worst
from bench.comparison.settings import Settings
from bench.comparison.timing import Times
from bench.comparison.words import (
    ALLOCATED,
    CANNOT_TELL,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    RESERVED,
    TFLOPS,
    TIME,
    VERDICTS,
    Quantity,
    names,
)
from bench.records import Record

OTHER_MACHINE = "different machines"
OTHER_MEMORY = "memory and status depend on the device"


@dataclass(frozen=True)
class _Judged:
    """A configuration on its way to a row."""

    pair: Pair
    machines: tuple[Difference, ...]
    changes: tuple[Change, ...]
    times: Times | None
    notes: tuple[str, ...]
    comparable: bool


def compare(base: Sequence[Record], candidate: Sequence[Record], settings: Settings | None = None) -> Comparison:
    """Compare two sets of rows.

    Parameters
    ----------
    base, candidate: sequence of records
        Latest attempts, as `bench.records.read_all` gives them. Runs of one configuration are repeats of each other,
        whatever their ``repeat``, seed, number of timed steps or sweep. Published rows are left out.
    settings: Settings
        Thresholds and error rates.
    """
    settings = settings or Settings()
    every = pairs(base, candidate)
    titles = _titles(every)
    matched = [(name, pair) for name, pair in zip(titles, every, strict=True) if pair.base and pair.candidate]
    judged = [(name, _judge(pair, settings)) for name, pair in matched]
    kinds = list(dict.fromkeys(found.pair.evidence for _, found in judged))
    scattering = sum(any(f.times and not f.times.exact for _, f in judged if f.pair.evidence == kind) for kind in kinds)
    shared = replace(settings, false_alarms=settings.false_alarms / max(scattering, 1))
    rows: list[Row] = []
    overall: list[Overall] = []
    for kind in kinds:
        found = [(name, each) for name, each in judged if each.pair.evidence == kind]
        timed, together = timing.time_changes([each.times for _, each in found if each.times], shared)
        results = iter(timed)
        of_kind = [_row(name, each, next(results) if each.times else None, shared) for name, each in found]
        rows += of_kind
        overall.append(_overall(kind, of_kind, together, found, shared))
    told = _differences(judged, MACHINE), _differences(judged, SOFTWARE)
    comparable = any(each.comparable for _, each in judged)
    verdict = _verdict(rows, overall) if comparable else CANNOT_TELL
    counts = Counter(row.verdict for row in rows)
    return Comparison(
        settings,
        verdict,
        remarks.sentence(verdict, rows, overall, told[0], comparable, settings),
        tuple(rows),
        tuple(overall),
        _unmatched(titles, every, "candidate"),
        _unmatched(titles, every, "base"),
        told[0],
        told[1],
        (*remarks.notes(base, candidate), *remarks.drift([each.pair for _, each in judged], rows, overall)),
        comparable,
        {verdict: counts[verdict] for verdict in VERDICTS},
    )


def _titles(every: Sequence[Pair]) -> list[str]:
    """A name for each pair, unique among those of its kind of evidence."""
    found: dict[int, str] = {}
    for kind in {pair.evidence for pair in every}:
        numbers = [number for number, pair in enumerate(every) if pair.evidence == kind]
        titles = names([every[number].any for number in numbers], [every[number].question for number in numbers])
        found |= dict(zip(numbers, titles, strict=True))
    return [found[number] for number in range(len(every))]


def _judge(pair: Pair, settings: Settings) -> _Judged:
    """Everything but the verdict on the time, which all configurations share the error rate of."""
    sides = judging.judged(pair.base), judging.judged(pair.candidate)
    different = tuple(machines.differences(pair.base, pair.candidate, MACHINE))
    blocked = bool(different) and not settings.across_machines
    memory_blocked = blocked and any(difference.memory for difference in different)
    notes = [*remarks.left_out(pair), *remarks.kept_apart(sides)]
    changes = [judging.status_change(*sides)]
    times: Times | None = None
    values = [[row[TIME.column] for row in side if _timed(row)] for side in sides]
    if all(values) and not blocked:
        times = Times(tuple(values[0]), tuple(values[1]), pair.evidence == "predicted")
    elif all(values):
        changes.append(_blocked(TIME, *values))
    elif all(any(row["status"] == "ok" and row.get(TIME.column) is not None for row in side) for side in sides):
        changes.append(Change(TIME.column, CANNOT_TELL, "every run of a side is degraded"))
    for quantity, threshold in ((ALLOCATED, settings.memory_threshold), (RESERVED, settings.reserved_threshold)):
        values = [[float(row[quantity.column]) for row in side if _has_memory(row, quantity)] for side in sides]
        if all(values):
            changes.append(judging.memory_change(quantity, values[0], values[1], threshold))
    if memory_blocked:
        changes = [_on_another_device(change) for change in changes]
    comparable = bool(sides[0] and sides[1]) and not memory_blocked
    return _Judged(pair, different, tuple(changes), times, tuple(notes), comparable)


def _timed(row: Record) -> bool:
    return row["status"] == "ok" and row.get(TIME.column) is not None and not row.get("degraded")


def _has_memory(row: Record, quantity: Quantity) -> bool:
    """A predicted run out of memory says what it would take."""
    return row.get(quantity.column) is not None and (row["status"] == "ok" or row["evidence"] == "predicted")


def _on_another_device(change: Change) -> Change:
    """What another device may explain is told and not judged; that all runs ended as before needs no explanation."""
    if change.quantity == "status" and change.verdict == NO_CHANGE:
        return change
    return replace(
        change, verdict=CANNOT_TELL, reason=OTHER_MACHINE if change.quantity == TIME.column else OTHER_MEMORY
    )


def _blocked(quantity: Quantity, base: Sequence[float], candidate: Sequence[float]) -> Change:
    """A change that is told and not judged."""
    before, after = (float(np.exp(np.mean(np.log(side)))) for side in (base, candidate))
    return Change(
        quantity.column, CANNOT_TELL, OTHER_MACHINE, before, after, len(base), len(candidate), after / before - 1
    )


def _row(name: str, found: _Judged, time: Change | None, settings: Settings) -> Row:
    status, *others = found.changes
    told = next((change for change in others if change.quantity == TIME.column), time)
    others = [change for change in others if change.quantity != TIME.column]
    throughput: list[Change] = []
    values = [
        [float(row[TFLOPS.column]) for row in side if _timed(row) and row.get(TFLOPS.column)]
        for side in (found.pair.base, found.pair.candidate)
    ]
    if told is not None and all(values):
        throughput = [timing.throughput_change(told, values[0], values[1], settings)]
    changes = (status, *([told] if told else []), *throughput, *others)
    software = tuple(machines.differences(found.pair.base, found.pair.candidate, SOFTWARE))
    verdict = worst([change.verdict for change in changes])
    return Row(
        name, found.pair.evidence, verdict, changes, dict(found.pair.question), found.machines, software, found.notes
    )


def _overall(
    kind: str, rows: Sequence[Row], time: Change | None, found: Sequence[tuple[str, _Judged]], settings: Settings
) -> Overall:
    changes: list[Change] = [time] if time else []
    if time is not None:
        compared = [row.get(TFLOPS.column) for row, (_, each) in zip(rows, found, strict=True) if each.times]
        ratios = [1 + (change.change or 0) for change in compared if change]
        if ratios:
            changes.append(replace(_mean(TFLOPS, ratios), verdict=time.verdict))
    for quantity, threshold in ((ALLOCATED, settings.memory_threshold), (RESERVED, settings.reserved_threshold)):
        known = [row.get(quantity.column) for row in rows]
        judged = [change for change in known if change and change.reason != OTHER_MEMORY]
        if judged:
            mean = _mean(quantity, [1 + (change.change or 0) for change in judged])
            verdict = NO_CHANGE
            if mean.change and abs(mean.change) >= threshold:
                verdict = REGRESSION if mean.change * quantity.worse > 0 else IMPROVEMENT
                verdict = verdict if any(change.verdict == verdict for change in judged) else CANNOT_TELL
            changes.append(replace(mean, verdict=verdict))
    verdict = _verdict(rows, [Overall(kind, len(rows), "", tuple(changes))])
    return Overall(kind, len(rows), verdict, tuple(changes))


def _mean(quantity: Quantity, ratios: Sequence[float]) -> Change:
    change = float(np.exp(np.mean(np.log(ratios)))) - 1
    return Change(quantity.column, NO_CHANGE, base_runs=len(ratios), candidate_runs=len(ratios), change=change)


def _verdict(rows: Sequence[Row], overall: Sequence[Overall]) -> str:
    """Any regression is one of the whole; "no change" holds if all rows say so, or all of them together do."""
    verdicts = [row.verdict for row in rows] + [change.verdict for each in overall for change in each.changes]
    if REGRESSION in verdicts or IMPROVEMENT in verdicts:
        return worst(verdicts)
    if all(row.verdict == NO_CHANGE for row in rows):
        return NO_CHANGE
    steady = all(row["status"].verdict == NO_CHANGE for row in rows)
    times = [each.get(TIME.column) for each in overall]
    together = all(change is not None and change.verdict == NO_CHANGE for change in times)
    return NO_CHANGE if steady and together else CANNOT_TELL


def _differences(judged: Iterable[tuple[str, _Judged]], facts: Sequence[machines.Fact]) -> tuple[Difference, ...]:
    """The differences of all configurations, each once."""
    found: dict[Difference, None] = {}
    for _, each in judged:
        known = each.machines if facts is MACHINE else machines.differences(each.pair.base, each.pair.candidate, facts)
        found |= dict.fromkeys(known)
    return tuple(found)


def _unmatched(titles: Sequence[str], every: Sequence[Pair], missing: str) -> tuple[Unmatched, ...]:
    found = []
    for name, pair in zip(titles, every, strict=True):
        if not getattr(pair, missing):
            found.append(Unmatched(name, pair.evidence, len(pair.base) + len(pair.candidate)))
    return tuple(found)
