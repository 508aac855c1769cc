"""Writing what comes of a comparison, over nothing that was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from bench.comparison.history import HistoryPoint, HistorySeries
from bench.comparison.result import (
    ALLOCATED,
    CANNOT_TELL,
    FORMAT_VERSION,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    RESERVED,
    STEP_TIME,
    TFLOPS,
    VERDICTS,
    ComparedConfiguration,
    OverallComparison,
    QuantityChange,
    RunComparison,
    describe_exclusion,
    format_percent,
)
from bench.core import presentation
from bench.core.errors import UsageError
from bench.core.presentation import MISSING, format_plural
from bench.records.packed_rows import ROWS_FILE
from bench.records.store import ATTEMPT_FILE_PATTERN, RUN_ID_PATTERN

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
        return presentation.format_seconds(number)
    if quantity in MEMORY_COLUMNS:
        return presentation.format_memory(number)
    return f"{presentation.format_number(number)} TFLOP/s"


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
    """What the interval of the time leaves out, the reasons of a verdict and what did not count, in one line."""
    time_change = row.get(STEP_TIME.column)
    exclusion = describe_exclusion(time_change) if time_change is not None and row.verdict == CANNOT_TELL else ""
    return "; ".join((*([f"the interval {exclusion}"] if exclusion else []), *row.reasons, *row.notes))


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


# --- A comparison as JSON.


def format_comparison_json(comparison: RunComparison, base: str, candidate: str) -> str:
    """The whole comparison; `base` and `candidate` say what was compared."""
    values = {
        "format": FORMAT_VERSION,
        "base": base,
        "candidate": candidate,
        "exit_code": comparison.exit_code,
        **asdict(comparison),
    }
    return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def format_history_json(all_series: Sequence[HistorySeries]) -> str:
    """Every series with its points and change points."""
    return (
        json.dumps(
            {"format": FORMAT_VERSION, "series": [_describe_series(series) for series in all_series]},
            indent=1,
            ensure_ascii=False,
            allow_nan=False,
        )
        + "\n"
    )


def _describe_series(series: HistorySeries) -> dict[str, Any]:
    return {
        "name": series.name,
        "evidence": series.evidence,
        "device": series.device,
        "quantity": series.quantity.column,
        "question": series.question,
        "points": [_describe_point(point) for point in series.points],
        "change_points": [asdict(change) for change in series.change_points],
    }


def _describe_point(point: HistoryPoint) -> dict[str, Any]:
    """All but the rows, which the store has."""
    return {field.name: getattr(point, field.name) for field in fields(point) if field.name != "rows"}


# --- A comparison as Markdown: a comment for a pull request.

VERDICT_EMOJI = {REGRESSION: "🔴", IMPROVEMENT: "🟢", NO_CHANGE: "⚪", CANNOT_TELL: "🟡"}
"""Beside the words, never instead of them."""

MAX_ROWS = 200
"""GitHub takes comments of up to 65,536 characters."""


def format_markdown(comparison: RunComparison, base: str, candidate: str) -> str:
    """The whole comparison; `base` and `candidate` say what was compared."""
    lines = [f"### {VERDICT_EMOJI[comparison.verdict]} {_escape_markdown(comparison.sentence)}", ""]
    lines += [f"Base `{base}`, candidate `{candidate}`.", ""]
    if comparison.machines:
        machines_note = "compared all the same" if comparison.settings.across_machines else "times are not compared"
        lines += [f"**The machines differ ({machines_note}):**", "", *_format_bullets(comparison.machines), ""]
    if comparison.software:
        lines += ["What changed:", "", *_format_bullets(comparison.software), ""]
    if comparison.rows:
        lines += [*_format_table(comparison), ""]
        reason_lines = [f"{row.name}: {format_reasons(row)}" for row in comparison.rows if format_reasons(row)]
        lines += _format_details("Reasons and what was left out", reason_lines)
    unmatched_lines = [line.strip() for line in list_unmatched(comparison)]
    num_unmatched = len(comparison.only_base) + len(comparison.only_candidate)
    lines += _format_details(f"{format_plural(num_unmatched, 'configuration')} on one side only", unmatched_lines)
    lines += [
        *(f"Note: {_escape_markdown(note)}.\n" for note in comparison.notes),
        f"<sub>{format_settings(comparison)}</sub>",
    ]
    return "\n".join(lines) + "\n"


def _format_table(comparison: RunComparison) -> list[str]:
    shown_quantities = list_shown_quantities(comparison)
    headings = ["", "configuration", "evidence", "runs", "status"]
    for quantity in shown_quantities:
        headings += [COLUMN_HEADINGS[quantity]]
        headings += (
            [f"{format_percent(comparison.settings.confidence, signed=False)} interval"]
            if quantity == STEP_TIME.column
            else []
        )
    headings.append("verdict")
    lines = [_format_table_line(headings), _format_table_line(["---"] * 5 + ["--:"] * (len(headings) - 6) + ["---"])]
    verdict_order = {verdict: position for position, verdict in enumerate(VERDICTS)}
    rows = sorted(comparison.rows, key=lambda row: verdict_order[row.verdict])
    for overall in comparison.overall:
        first_cells = [
            VERDICT_EMOJI[overall.verdict],
            f"**all {overall.configurations} together**",
            overall.evidence,
            "",
            "",
        ]
        lines.append(
            _format_table_line([*first_cells, *_format_changes(overall, shown_quantities), f"**{overall.verdict}**"])
        )
    for row in rows[:MAX_ROWS]:
        first_cells = [
            VERDICT_EMOJI[row.verdict],
            row.name,
            row.evidence,
            format_run_counts(row),
            format_status(row),
        ]
        lines.append(_format_table_line([*first_cells, *_format_changes(row, shown_quantities), row.verdict]))
    if len(rows) > MAX_ROWS:
        lines.append(_format_table_line(["", f"and {len(rows) - MAX_ROWS} more", *[""] * (len(headings) - 2)]))
    return lines


def _format_changes(row: ComparedConfiguration | OverallComparison, quantities: Sequence[str]) -> list[str]:
    cell_texts = []
    for quantity in quantities:
        change = row.get(quantity)
        cell_texts += [format_change(change)] + ([format_interval(change)] if quantity == STEP_TIME.column else [])
    return cell_texts


def _format_table_line(parts: Sequence[str]) -> str:
    return (
        "| "
        + " | ".join(_escape_markdown(part).replace("|", "\\|") if "**" not in part else part for part in parts)
        + " |"
    )


def _format_bullets(items: Sequence[object]) -> list[str]:
    return [f"- {_escape_markdown(str(item))}" for item in items]


def _format_details(title: str, lines: Sequence[str]) -> list[str]:
    """A list that is folded away."""
    if not lines:
        return []
    return [f"<details><summary>{title}</summary>", "", *_format_bullets(lines[:MAX_ROWS]), "", "</details>", ""]


def _escape_markdown(text: str) -> str:
    """Text in which nothing is taken for markup."""
    one_line = " ".join(text.split())
    for character in "\\`*_<>[]":
        one_line = one_line.replace(character, "\\" + character)
    return one_line


# --- Writing what comes of a comparison, over nothing that was measured.


def write_texts(texts: dict[Path, str]) -> None:
    """Write texts to files; folders are made.

    Raises
    ------
    UsageError
        If a file would replace a row, or cannot be written.
    """
    for path in texts:
        is_row = ATTEMPT_FILE_PATTERN.match(path.name) and RUN_ID_PATTERN.match(path.absolute().parent.name)
        if is_row or path.name == ROWS_FILE:
            raise UsageError(f"{path} is not valid: choose a file that is not the row of a run.")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}): choose another file.") from None
