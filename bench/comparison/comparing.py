"""Base against candidate: every configuration judged, and all of them together. Pure functions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.comparison import hosts, status_and_memory, timing
from bench.comparison.hosts import MACHINE_FACTS, SOFTWARE_FACTS, EnvironmentDifference
from bench.comparison.notes import (
    format_sentence,
    list_drift_warnings,
    list_left_out,
    list_notes,
    list_other_differences,
)
from bench.comparison.pairing import ConfigurationRuns, pair_runs
from bench.comparison.result import (
    ALLOCATED,
    CANNOT_TELL,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    RESERVED,
    STEP_TIME,
    TFLOPS,
    VERDICTS,
    ComparedConfiguration,
    ComparedQuantity,
    ComparisonSettings,
    OverallComparison,
    QuantityChange,
    RunComparison,
    UnmatchedConfiguration,
    find_worst_verdict,
    name_configurations,
)
from bench.comparison.timing import StepTimes
from bench.records import Record

OTHER_MACHINE_REASON = "different machines"
OTHER_DEVICE_REASON = "memory and status depend on the device"


@dataclass(frozen=True)
class _ComparedPair:
    """A configuration on its way to a row."""

    pair: ConfigurationRuns
    machine_differences: tuple[EnvironmentDifference, ...]
    changes: tuple[QuantityChange, ...]
    times: StepTimes | None
    notes: tuple[str, ...]
    is_comparable: bool


def compare_records(
    base: Sequence[Record], candidate: Sequence[Record], settings: ComparisonSettings | None = None
) -> RunComparison:
    """Compare two sets of rows.

    Parameters
    ----------
    base, candidate: sequence of records
        Latest attempts, as `bench.records.read_latest_attempts` gives them. Runs of one configuration are repeats of
        each other, whatever their ``repeat``, seed, number of timed steps or sweep. Published rows are left out.
    settings: ComparisonSettings
        Thresholds and error rates.
    """
    settings = settings or ComparisonSettings()
    pairs = pair_runs(base, candidate)
    titles = _name_pairs(pairs)
    matched_pairs = [(name, pair) for name, pair in zip(titles, pairs, strict=True) if pair.base and pair.candidate]
    compared_pairs = [(name, _compare_pair(pair, settings)) for name, pair in matched_pairs]
    evidence_kinds = list(dict.fromkeys(compared.pair.evidence for _, compared in compared_pairs))
    num_scattering_kinds = sum(
        any(
            compared.times and not compared.times.is_exact
            for _, compared in compared_pairs
            if compared.pair.evidence == evidence
        )
        for evidence in evidence_kinds
    )
    shared_settings = replace(settings, false_alarms=settings.false_alarms / max(num_scattering_kinds, 1))
    rows: list[ComparedConfiguration] = []
    overall: list[OverallComparison] = []
    for evidence in evidence_kinds:
        kind_pairs = [(name, compared) for name, compared in compared_pairs if compared.pair.evidence == evidence]
        time_changes, overall_time_change = timing.compare_times(
            [compared.times for _, compared in kind_pairs if compared.times], shared_settings
        )
        remaining_changes = iter(time_changes)
        kind_rows = [
            _build_configuration(name, compared, next(remaining_changes) if compared.times else None, shared_settings)
            for name, compared in kind_pairs
        ]
        rows += kind_rows
        overall.append(_build_overall(evidence, kind_rows, overall_time_change, kind_pairs, shared_settings))
    differences = (
        _collect_differences(compared_pairs, MACHINE_FACTS),
        _collect_differences(compared_pairs, SOFTWARE_FACTS),
    )
    is_comparable = any(compared.is_comparable for _, compared in compared_pairs)
    verdict = _decide_verdict(rows, overall) if is_comparable else CANNOT_TELL
    verdict_counts = Counter(row.verdict for row in rows)
    return RunComparison(
        settings,
        verdict,
        format_sentence(verdict, rows, overall, differences[0], is_comparable, settings),
        tuple(rows),
        tuple(overall),
        _list_unmatched(titles, pairs, "candidate"),
        _list_unmatched(titles, pairs, "base"),
        differences[0],
        differences[1],
        (
            *list_notes(base, candidate),
            *list_drift_warnings([compared.pair for _, compared in compared_pairs], rows, overall),
        ),
        is_comparable,
        {verdict: verdict_counts[verdict] for verdict in VERDICTS},
    )


def _name_pairs(pairs: Sequence[ConfigurationRuns]) -> list[str]:
    """A name for each pair, unique among those of its kind of evidence."""
    titles_by_index: dict[int, str] = {}
    for evidence in {pair.evidence for pair in pairs}:
        indices = [index for index, pair in enumerate(pairs) if pair.evidence == evidence]
        titles = name_configurations(
            [pairs[index].representative_row for index in indices], [pairs[index].question for index in indices]
        )
        titles_by_index |= dict(zip(indices, titles, strict=True))
    return [titles_by_index[index] for index in range(len(pairs))]


def _compare_pair(pair: ConfigurationRuns, settings: ComparisonSettings) -> _ComparedPair:
    """Everything but the verdict on the time, which all configurations share the error rate of."""
    sides = status_and_memory.select_results(pair.base), status_and_memory.select_results(pair.candidate)
    machine_differences = tuple(hosts.find_differences(pair.base, pair.candidate, MACHINE_FACTS))
    is_time_blocked = bool(machine_differences) and not settings.across_machines
    is_memory_blocked = is_time_blocked and any(difference.memory for difference in machine_differences)
    notes = [*list_left_out(pair), *list_other_differences(sides)]
    changes = [status_and_memory.compare_statuses(*sides)]
    times: StepTimes | None = None
    values = [[row[STEP_TIME.column] for row in side if _has_valid_time(row)] for side in sides]
    if all(values) and not is_time_blocked:
        timed_sides = [[row for row in side if _has_valid_time(row)] for side in sides]
        times = StepTimes(
            tuple(values[0]), tuple(values[1]), pair.evidence == "predicted", is_interleaved(*timed_sides)
        )
    elif all(values):
        changes.append(_build_unjudged_change(STEP_TIME, *values))
    elif all(any(row["status"] == "ok" and row.get(STEP_TIME.column) is not None for row in side) for side in sides):
        changes.append(QuantityChange(STEP_TIME.column, CANNOT_TELL, "every run of a side is degraded"))
    for quantity, threshold in ((ALLOCATED, settings.memory_threshold), (RESERVED, settings.reserved_threshold)):
        values = [[float(row[quantity.column]) for row in side if _has_memory(row, quantity)] for side in sides]
        if all(values):
            changes.append(status_and_memory.compare_memory(quantity, values[0], values[1], threshold))
    if is_memory_blocked:
        changes = [_withhold_verdict(change) for change in changes]
    is_comparable = bool(sides[0] and sides[1]) and not is_memory_blocked
    return _ComparedPair(pair, machine_differences, tuple(changes), times, tuple(notes), is_comparable)


def is_interleaved(base: Sequence[Record], candidate: Sequence[Record]) -> bool:
    """Whether runs were made in turn: sorted by their start, every two that follow each other are one of each side."""
    starts = [[str(row.get("started_at") or "") for row in side] for side in (base, candidate)]
    if len(base) != len(candidate) or not all(all(side) for side in starts):
        return False
    if {(row["run_id"], row.get("attempt"), row["started_at"]) for row in base} & {
        (row["run_id"], row.get("attempt"), row["started_at"]) for row in candidate
    }:
        return False  # a store beside itself
    rounds = list(zip(*(sorted(side) for side in starts), strict=True))
    return all(min(pair) < max(pair) for pair in rounds) and all(
        max(former) <= min(latter) for former, latter in itertools.pairwise(rounds)
    )


def _has_valid_time(row: Record) -> bool:
    return row["status"] == "ok" and row.get(STEP_TIME.column) is not None and not row.get("degraded")


def _has_memory(row: Record, quantity: ComparedQuantity) -> bool:
    """A predicted run out of memory says what it would take."""
    return row.get(quantity.column) is not None and (row["status"] == "ok" or row["evidence"] == "predicted")


def _withhold_verdict(change: QuantityChange) -> QuantityChange:
    """What another device may explain is told and not judged; that all runs ended as before needs no explanation."""
    if change.quantity == "status" and change.verdict == NO_CHANGE:
        return change
    return replace(
        change,
        verdict=CANNOT_TELL,
        reason=OTHER_MACHINE_REASON if change.quantity == STEP_TIME.column else OTHER_DEVICE_REASON,
    )


def _build_unjudged_change(
    quantity: ComparedQuantity, base: Sequence[float], candidate: Sequence[float]
) -> QuantityChange:
    """A change that is told and not judged."""
    before, after = (float(np.exp(np.mean(np.log(side)))) for side in (base, candidate))
    return QuantityChange(
        quantity.column, CANNOT_TELL, OTHER_MACHINE_REASON, before, after, len(base), len(candidate), after / before - 1
    )


def _build_configuration(
    name: str, compared: _ComparedPair, time_change: QuantityChange | None, settings: ComparisonSettings
) -> ComparedConfiguration:
    status, *other_changes = compared.changes
    shown_time_change = next((change for change in other_changes if change.quantity == STEP_TIME.column), time_change)
    other_changes = [change for change in other_changes if change.quantity != STEP_TIME.column]
    throughput_changes: list[QuantityChange] = []
    values = [
        [float(row[TFLOPS.column]) for row in side if _has_valid_time(row) and row.get(TFLOPS.column)]
        for side in (compared.pair.base, compared.pair.candidate)
    ]
    if shown_time_change is not None and all(values):
        throughput_changes = [timing.compare_throughput(shown_time_change, values[0], values[1], settings)]
    changes = (status, *([shown_time_change] if shown_time_change else []), *throughput_changes, *other_changes)
    software = tuple(hosts.find_differences(compared.pair.base, compared.pair.candidate, SOFTWARE_FACTS))
    verdict = find_worst_verdict([change.verdict for change in changes])
    return ComparedConfiguration(
        name,
        compared.pair.evidence,
        verdict,
        changes,
        dict(compared.pair.question),
        compared.machine_differences,
        software,
        compared.notes,
    )


def _build_overall(
    evidence: str,
    rows: Sequence[ComparedConfiguration],
    time_change: QuantityChange | None,
    kind_pairs: Sequence[tuple[str, _ComparedPair]],
    settings: ComparisonSettings,
) -> OverallComparison:
    changes: list[QuantityChange] = [time_change] if time_change else []
    if time_change is not None:
        throughput_changes = [
            row.get(TFLOPS.column) for row, (_, compared) in zip(rows, kind_pairs, strict=True) if compared.times
        ]
        ratios = [1 + (change.change or 0) for change in throughput_changes if change]
        if ratios:
            changes.append(replace(_compute_mean_change(TFLOPS, ratios), verdict=time_change.verdict))
    for quantity, threshold in ((ALLOCATED, settings.memory_threshold), (RESERVED, settings.reserved_threshold)):
        quantity_changes = [row.get(quantity.column) for row in rows]
        judged_changes = [change for change in quantity_changes if change and change.reason != OTHER_DEVICE_REASON]
        if judged_changes:
            mean_change = _compute_mean_change(quantity, [1 + (change.change or 0) for change in judged_changes])
            verdict = NO_CHANGE
            if mean_change.change and abs(mean_change.change) >= threshold:
                verdict = REGRESSION if mean_change.change * quantity.worse_direction > 0 else IMPROVEMENT
                verdict = verdict if any(change.verdict == verdict for change in judged_changes) else CANNOT_TELL
            changes.append(replace(mean_change, verdict=verdict))
    # of all together, not of any one: a configuration's own verdict is in its row
    verdicts = [change.verdict for change in changes] or [NO_CHANGE]
    if CANNOT_TELL not in verdicts and any(row["status"].verdict != NO_CHANGE for row in rows):
        verdicts.append(CANNOT_TELL)
    return OverallComparison(evidence, len(rows), find_worst_verdict(verdicts), tuple(changes))


def _compute_mean_change(quantity: ComparedQuantity, ratios: Sequence[float]) -> QuantityChange:
    change = float(np.exp(np.mean(np.log(ratios)))) - 1
    return QuantityChange(quantity.column, NO_CHANGE, base_runs=len(ratios), candidate_runs=len(ratios), change=change)


def _decide_verdict(rows: Sequence[ComparedConfiguration], overall: Sequence[OverallComparison]) -> str:
    """Any regression is one of the whole; "no change" holds if all rows say so, or all of them together do."""
    verdicts = [row.verdict for row in rows] + [
        change.verdict for kind_overall in overall for change in kind_overall.changes
    ]
    if REGRESSION in verdicts or IMPROVEMENT in verdicts:
        return find_worst_verdict(verdicts)
    if all(row.verdict == NO_CHANGE for row in rows):
        return NO_CHANGE
    is_status_unchanged = all(row["status"].verdict == NO_CHANGE for row in rows)
    time_changes = [kind_overall.get(STEP_TIME.column) for kind_overall in overall]
    are_times_unchanged = all(change is not None and change.verdict == NO_CHANGE for change in time_changes)
    return NO_CHANGE if is_status_unchanged and are_times_unchanged else CANNOT_TELL


def _collect_differences(
    compared_pairs: Iterable[tuple[str, _ComparedPair]], facts: Sequence[hosts.EnvironmentFact]
) -> tuple[EnvironmentDifference, ...]:
    """The differences of all configurations, each once."""
    unique_differences: dict[EnvironmentDifference, None] = {}
    for _, compared in compared_pairs:
        pair_differences = (
            compared.machine_differences
            if facts is MACHINE_FACTS
            else hosts.find_differences(compared.pair.base, compared.pair.candidate, facts)
        )
        unique_differences |= dict.fromkeys(pair_differences)
    return tuple(unique_differences)


def _list_unmatched(
    titles: Sequence[str], pairs: Sequence[ConfigurationRuns], missing: str
) -> tuple[UnmatchedConfiguration, ...]:
    unmatched = []
    for name, pair in zip(titles, pairs, strict=True):
        if not getattr(pair, missing):
            unmatched.append(UnmatchedConfiguration(name, pair.evidence, len(pair.base) + len(pair.candidate)))
    return tuple(unmatched)
