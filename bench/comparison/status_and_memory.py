"""Verdicts on one configuration's status and memory; those on its times are in `timing`. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from scipy import stats

from bench.comparison.result import (
    CANNOT_TELL,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    ComparedQuantity,
    QuantityChange,
    format_percent,
)
from bench.records import Record

NO_RESULT_STATUSES = ("preempted", "skipped")
"""Statuses that say nothing of the run: it was taken away, or never started."""

FLAKY_SIGNIFICANCE_LEVEL = 0.05
"""Significance of a difference between runs of which some end well and some do not (Fisher's exact test)."""


def select_results(records: Sequence[Record]) -> list[Record]:
    """The rows that are results."""
    return [record for record in records if record["status"] not in NO_RESULT_STATUSES]


def compare_statuses(base: Sequence[Record], candidate: Sequence[Record]) -> QuantityChange:
    """What became of the runs: all of them ending otherwise than before is a change, whatever their number.

    Where some runs of one side end well and some do not (flaky), only a difference that is significant counts.
    """
    side_statuses = [[record["status"] for record in side] for side in (base, candidate)]
    status_texts = [_format_statuses(statuses) for statuses in side_statuses]
    ok_counts = [statuses.count("ok") for statuses in side_statuses]
    failed_counts = [len(statuses) - ok_count for statuses, ok_count in zip(side_statuses, ok_counts, strict=True)]
    verdict, reason = NO_CHANGE, ""
    if not side_statuses[0] or not side_statuses[1]:
        verdict, reason = CANNOT_TELL, f"no run of the {'candidate' if side_statuses[0] else 'base'} came to a result"
    elif not failed_counts[0] and not ok_counts[1]:
        verdict, reason = REGRESSION, f"ended ok, now {status_texts[1]}{_describe_failure(candidate)}"
    elif not ok_counts[0] and not failed_counts[1]:
        verdict, reason = IMPROVEMENT, f"was {status_texts[0]}, now ok"
    elif not ok_counts[0] and not ok_counts[1]:
        if set(side_statuses[0]) != set(side_statuses[1]):
            verdict, reason = (
                CANNOT_TELL,
                f"failed in both: {status_texts[0]}, now {status_texts[1]}{_describe_failure(candidate)}",
            )
        elif set(side_statuses[0]) != {"oom"}:
            verdict, reason = CANNOT_TELL, f"failed in both: {status_texts[1]}{_describe_failure(candidate)}"
        else:
            reason = "out of memory in both"
    elif failed_counts[0] or failed_counts[1]:
        verdict, reason = _judge_flaky(ok_counts, failed_counts)
        reason = f"flaky: {status_texts[0]}, now {status_texts[1]}{_describe_failure(candidate)}; {reason}"
    return QuantityChange(
        "status", verdict, reason, status_texts[0], status_texts[1], len(side_statuses[0]), len(side_statuses[1])
    )


def _judge_flaky(ok_counts: Sequence[int], failed_counts: Sequence[int]) -> tuple[str, str]:
    table = [[ok_counts[0], failed_counts[0]], [ok_counts[1], failed_counts[1]]]
    if stats.fisher_exact(table, "greater").pvalue <= FLAKY_SIGNIFICANCE_LEVEL:
        return REGRESSION, "too many more to be chance"
    if stats.fisher_exact(table, "less").pvalue <= FLAKY_SIGNIFICANCE_LEVEL:
        return IMPROVEMENT, "too many fewer to be chance"
    return CANNOT_TELL, "may be chance"


def _format_statuses(statuses: Sequence[str]) -> str:
    """``oom``, or ``2 ok, 1 oom`` where they differ."""
    status_counts = Counter(statuses)
    if len(status_counts) == 1:
        return statuses[0]
    return ", ".join(f"{count} {status}" for status, count in status_counts.most_common()) or "no result"


def _describe_failure(records: Sequence[Record]) -> str:
    """In brackets, what the first run that did not end well says of it."""
    for record in records:
        if record["status"] == "oom" and record.get("oom_phase"):
            return f" (in {record['oom_phase']})"
        if record["status"] not in ("ok", "oom") and record.get("error"):
            return f" ({str(record['error'])[:120]})"
    return ""


def compare_memory(
    quantity: ComparedQuantity, base: Sequence[float], candidate: Sequence[float], threshold: float
) -> QuantityChange:
    """The peak of memory: equal code takes the same, so a single run of each side says it.

    A change counts if the median changed by at least `threshold`, and no run of one side lies within the range of
    the other.
    """
    base_median, candidate_median = median(base), median(candidate)
    change = candidate_median / base_median - 1 if base_median else 0.0
    is_separate = min(candidate) > max(base) if change > 0 else max(candidate) < min(base)
    verdict, reason = NO_CHANGE, ""
    if abs(change) >= threshold and change != 0:
        if is_separate:
            verdict = REGRESSION if change * quantity.worse_direction > 0 else IMPROVEMENT
            reason = f"{quantity.title} {format_percent(change)}"
        else:
            verdict, reason = (
                CANNOT_TELL,
                f"{quantity.title} {format_percent(change)}, but the runs of both sides overlap",
            )
    return QuantityChange(
        quantity.column, verdict, reason, base_median, candidate_median, len(base), len(candidate), change
    )
