"""Numbers and words that the outputs of a comparison share."""

from __future__ import annotations

from bench.comparison.result import (
    ALLOCATED,
    RESERVED,
    STEP_TIME,
    TFLOPS,
    ComparedConfiguration,
    QuantityChange,
    RunComparison,
    format_percent,
)
from bench.reporting.drawing import labels
from bench.reporting.drawing.labels import MISSING, format_plural

MEMORY_COLUMNS = (ALLOCATED.column, RESERVED.column)
COLUMN_HEADINGS = {
    STEP_TIME.column: "step time",
    TFLOPS.column: "TFLOPS/GPU",
    ALLOCATED.column: "allocated",
    RESERVED.column: "reserved",
}
"""Headings of the quantities."""


def format_change(change: QuantityChange | None) -> str:
    """``+3.1 %``, or a dash where either side has no value."""
    return MISSING if change is None or change.change is None else format_percent(change.change)


def format_interval(change: QuantityChange | None) -> str:
    """``+2.8 to +3.4 %``."""
    if change is None or change.low is None or change.high is None:
        return MISSING
    return f"{format_percent(change.low).removesuffix(' %')} to {format_percent(change.high)}"


def format_value(quantity: str, number: float | str | None) -> str:
    """A quantity with its unit."""
    if number is None or isinstance(number, str):
        return number or MISSING
    if quantity == STEP_TIME.column:
        return labels.format_seconds(number)
    if quantity in MEMORY_COLUMNS:
        return labels.format_memory(number)
    return f"{labels.format_number(number)} TFLOP/s" if number >= 1 else f"{labels.format_number(number * 1e3)} GFLOP/s"


def format_run_counts(row: ComparedConfiguration) -> str:
    """Runs of base and candidate: ``5/5``."""
    status_change = row["status"]
    return f"{status_change.base_runs}/{status_change.candidate_runs}"


def format_status(row: ComparedConfiguration) -> str:
    """``ok``, or ``ok → oom``."""
    status_change = row["status"]
    return (
        str(status_change.base)
        if status_change.base == status_change.candidate
        else f"{status_change.base} → {status_change.candidate}"
    )


def list_shown_quantities(comparison: RunComparison) -> list[str]:
    """Quantities with a column: reserved memory only where it is not the same as allocated, as it is on a CPU."""
    shown_quantities = []
    for quantity in COLUMN_HEADINGS:
        rows_and_changes = [(row, row.get(quantity)) for row in comparison.rows if row.get(quantity)]
        if quantity == RESERVED.column and all(_has_equal_memory(row) for row, _ in rows_and_changes):
            continue
        if rows_and_changes:
            shown_quantities.append(quantity)
    return shown_quantities


def _has_equal_memory(row: ComparedConfiguration) -> bool:
    allocated, reserved = (row.get(quantity) for quantity in MEMORY_COLUMNS)
    sides = [None if change is None else (change.base, change.candidate) for change in (allocated, reserved)]
    return sides[0] == sides[1]


def format_reasons(row: ComparedConfiguration) -> str:
    """The reasons of a verdict and what did not count, in one line."""
    return "; ".join((*row.reasons, *row.notes))


def format_settings(comparison: RunComparison) -> str:
    """What counts as a change, in words."""
    settings = comparison.settings
    return (
        f"A change of the step time counts from {format_percent(settings.threshold, signed=False)} on, if it is "
        "significant: "
        "equal code raises any false alarm in no more than about "
        f"{format_percent(settings.false_alarms, signed=False)} of "
        f"comparisons. "
        f"Allocated memory counts from {format_percent(settings.memory_threshold, signed=False)} on, reserved from "
        f"{format_percent(settings.reserved_threshold, signed=False)}. Runs are the unit, not steps."
    )


def list_unmatched(comparison: RunComparison) -> list[str]:
    """What only one side has: a heading and a line per configuration."""
    lines = []
    for side, configurations in (("base", comparison.only_base), ("candidate", comparison.only_candidate)):
        if configurations:
            lines.append(f"Only in {side}: {format_plural(len(configurations), 'configuration')}")
            lines += [
                f"  {configuration.name} ({configuration.evidence}, {format_plural(configuration.runs, 'run')})"
                for configuration in configurations
            ]
    return lines
