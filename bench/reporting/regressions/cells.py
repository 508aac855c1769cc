"""Numbers and words that the outputs of a comparison share."""

from __future__ import annotations

from bench.comparison.result import Change, Comparison, Row
from bench.comparison.words import ALLOCATED, RESERVED, TFLOPS, TIME, percent
from bench.reporting import labels
from bench.reporting.labels import MISSING, counted

MEMORY = (ALLOCATED.column, RESERVED.column)
COLUMNS = {
    TIME.column: "step time",
    TFLOPS.column: "TFLOPS/GPU",
    ALLOCATED.column: "allocated",
    RESERVED.column: "reserved",
}
"""Headings of the quantities."""


def change(each: Change | None) -> str:
    """``+3.1 %``, or a dash where either side has no value."""
    return MISSING if each is None or each.change is None else percent(each.change)


def interval(each: Change | None) -> str:
    """``+2.8 to +3.4 %``."""
    if each is None or each.low is None or each.high is None:
        return MISSING
    return f"{percent(each.low).removesuffix(' %')} to {percent(each.high)}"


def value(quantity: str, number: float | str | None) -> str:
    """A quantity with its unit."""
    if number is None or isinstance(number, str):
        return number or MISSING
    if quantity == TIME.column:
        return labels.seconds(number)
    if quantity in MEMORY:
        return labels.memory(number)
    return f"{labels.number(number)} TFLOP/s" if number >= 1 else f"{labels.number(number * 1e3)} GFLOP/s"


def runs(row: Row) -> str:
    """Runs of base and candidate: ``5/5``."""
    status = row["status"]
    return f"{status.base_runs}/{status.candidate_runs}"


def status(row: Row) -> str:
    """``ok``, or ``ok → oom``."""
    change_ = row["status"]
    return str(change_.base) if change_.base == change_.candidate else f"{change_.base} → {change_.candidate}"


def shown(comparison: Comparison) -> list[str]:
    """Quantities with a column: reserved memory only where it is not the same as allocated, as it is on a CPU."""
    found = []
    for quantity in COLUMNS:
        known = [(row, row.get(quantity)) for row in comparison.rows if row.get(quantity)]
        if quantity == RESERVED.column and all(_as_allocated(row) for row, _ in known):
            continue
        if known:
            found.append(quantity)
    return found


def _as_allocated(row: Row) -> bool:
    allocated, reserved = (row.get(quantity) for quantity in MEMORY)
    sides = [None if each is None else (each.base, each.candidate) for each in (allocated, reserved)]
    return sides[0] == sides[1]


def why(row: Row) -> str:
    """The reasons of a verdict and what did not count, in one line."""
    return "; ".join((*row.reasons, *row.notes))


def settings_sentence(comparison: Comparison) -> str:
    """What counts as a change, in words."""
    settings = comparison.settings
    return (
        f"A change of the step time counts from {percent(settings.threshold, signed=False)} on, if it is significant: "
        f"equal code raises any false alarm in no more than about {percent(settings.false_alarms, signed=False)} of "
        f"comparisons. "
        f"Allocated memory counts from {percent(settings.memory_threshold, signed=False)} on, reserved from "
        f"{percent(settings.reserved_threshold, signed=False)}. Runs are the unit, not steps."
    )


def unmatched(comparison: Comparison) -> list[str]:
    """What only one side has: a heading and a line per configuration."""
    lines = []
    for side, found in (("base", comparison.only_base), ("candidate", comparison.only_candidate)):
        if found:
            lines.append(f"Only in {side}: {counted(len(found), 'configuration')}")
            lines += [f"  {each.name} ({each.evidence}, {counted(each.runs, 'run')})" for each in found]
    return lines
