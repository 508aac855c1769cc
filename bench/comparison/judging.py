"""Verdicts on one configuration's status and memory; those on its times are in `timing`. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from scipy import stats

from bench.comparison.result import Change
from bench.comparison.words import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION, Quantity, percent
from bench.records import Record

NO_RESULT = ("preempted", "skipped")
"""Statuses that say nothing of the run: it was taken away, or never started."""

MIXED_LEVEL = 0.05
"""Significance of a difference between runs of which some end well and some do not (Fisher's exact test)."""


def judged(records: Sequence[Record]) -> list[Record]:
    """The rows that are results."""
    return [record for record in records if record["status"] not in NO_RESULT]


def status_change(base: Sequence[Record], candidate: Sequence[Record]) -> Change:
    """What became of the runs: all of them ending otherwise than before is a change, whatever their number.

    Where some runs of one side end well and some do not (flaky), only a difference that is significant counts.
    """
    sides = [[record["status"] for record in side] for side in (base, candidate)]
    words = [_words(statuses) for statuses in sides]
    fine = [statuses.count("ok") for statuses in sides]
    failed = [len(statuses) - ok for statuses, ok in zip(sides, fine, strict=True)]
    verdict, reason = NO_CHANGE, ""
    if not sides[0] or not sides[1]:
        verdict, reason = CANNOT_TELL, f"no run of the {'candidate' if sides[0] else 'base'} came to a result"
    elif not failed[0] and not fine[1]:
        verdict, reason = REGRESSION, f"ended ok, now {words[1]}{_cause(candidate)}"
    elif not fine[0] and not failed[1]:
        verdict, reason = IMPROVEMENT, f"was {words[0]}, now ok"
    elif not fine[0] and not fine[1]:
        if set(sides[0]) != set(sides[1]):
            verdict, reason = (
                CANNOT_TELL,
                f"failed in both: {words[0]}, now {words[1]}{_cause(candidate)}",
            )
        elif set(sides[0]) != {"oom"}:
            verdict, reason = CANNOT_TELL, f"failed in both: {words[1]}{_cause(candidate)}"
        else:
            reason = "out of memory in both"
    elif failed[0] or failed[1]:
        verdict, reason = _flaky(fine, failed)
        reason = f"flaky: {words[0]}, now {words[1]}{_cause(candidate)}; {reason}"
    return Change("status", verdict, reason, words[0], words[1], len(sides[0]), len(sides[1]))


def _flaky(fine: Sequence[int], failed: Sequence[int]) -> tuple[str, str]:
    table = [[fine[0], failed[0]], [fine[1], failed[1]]]
    if stats.fisher_exact(table, "greater").pvalue <= MIXED_LEVEL:
        return REGRESSION, "too many more to be chance"
    if stats.fisher_exact(table, "less").pvalue <= MIXED_LEVEL:
        return IMPROVEMENT, "too many fewer to be chance"
    return CANNOT_TELL, "may be chance"


def _words(statuses: Sequence[str]) -> str:
    """``oom``, or ``2 ok, 1 oom`` where they differ."""
    found = Counter(statuses)
    if len(found) == 1:
        return statuses[0]
    return ", ".join(f"{count} {status}" for status, count in found.most_common()) or "no result"


def _cause(records: Sequence[Record]) -> str:
    """In brackets, what the first run that did not end well says of it."""
    for record in records:
        if record["status"] == "oom" and record.get("oom_phase"):
            return f" (in {record['oom_phase']})"
        if record["status"] not in ("ok", "oom") and record.get("error"):
            return f" ({str(record['error'])[:120]})"
    return ""


def memory_change(quantity: Quantity, base: Sequence[float], candidate: Sequence[float], threshold: float) -> Change:
    """The peak of memory: equal code takes the same, so a single run of each side says it.

    A change counts if the median changed by at least `threshold`, and no run of one side lies within the range of
    the other.
    """
    low, high = median(base), median(candidate)
    change = high / low - 1 if low else 0.0
    apart = min(candidate) > max(base) if change > 0 else max(candidate) < min(base)
    verdict, reason = NO_CHANGE, ""
    if abs(change) >= threshold and change != 0:
        if apart:
            verdict = REGRESSION if change * quantity.worse > 0 else IMPROVEMENT
            reason = f"{quantity.title} {percent(change)}"
        else:
            verdict, reason = CANNOT_TELL, f"{quantity.title} {percent(change)}, but the runs of both sides overlap"
    return Change(quantity.column, verdict, reason, low, high, len(base), len(candidate), change)
