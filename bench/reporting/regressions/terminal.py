"""A comparison and a history as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.comparison.history import ChangePoint, HistorySeries
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
    OverallComparison,
    RunComparison,
    format_percent,
)
from bench.core.presentation import MISSING, format_plural
from bench.reporting.regressions import files

VERDICT_STYLES = {REGRESSION: "bold red", IMPROVEMENT: "green", NO_CHANGE: "", CANNOT_TELL: "yellow"}
MAX_UNMATCHED_LINES = 12
"""Lines on what only one side has, unless all are asked for."""


def build_comparison_tables(comparison: RunComparison, *, show_all: bool = False) -> RenderableType:
    """Differences of machines first, then every configuration, all together, and what could not be compared."""
    parts: list[RenderableType] = []
    if comparison.machines:
        machines_note = "compared all the same" if comparison.settings.across_machines else "times are not compared"
        parts.append(Text(f"The machines differ ({machines_note}):", style="bold red"))
        parts += [Text(f"  {difference}", style="red") for difference in comparison.machines]
    if comparison.software:
        parts.append(Text("What changed between base and candidate:"))
        parts += [Text(f"  {difference}") for difference in comparison.software]
    if comparison.rows:
        parts += [Text(), _build_table(comparison), Text()]
        parts += _list_reasons(comparison)
    unmatched_lines = files.list_unmatched(comparison)
    parts += [Text(line) for line in (unmatched_lines if show_all else unmatched_lines[:MAX_UNMATCHED_LINES])]
    if len(unmatched_lines) > MAX_UNMATCHED_LINES and not show_all:
        parts.append(Text(f"  and {len(unmatched_lines) - MAX_UNMATCHED_LINES} more: --all shows them", style="dim"))
    parts += [Text(f"Note: {note}.") for note in comparison.notes]
    if comparison.rows:
        parts.append(Text(files.format_settings(comparison), style="dim"))
    parts.append(Text(comparison.sentence, style=f"bold {VERDICT_STYLES[comparison.verdict]}".strip()))
    return Group(*parts)


def _build_table(comparison: RunComparison) -> Table:
    table = Table(box=None, pad_edge=False)
    shown_quantities = files.list_shown_quantities(comparison)
    evidence_kinds = {row.evidence for row in comparison.rows}
    table.add_column("configuration", overflow="fold")
    if len(evidence_kinds) > 1:
        table.add_column("evidence")
    table.add_column("runs", justify="right")
    table.add_column("status")
    for quantity in shown_quantities:
        table.add_column(files.COLUMN_HEADINGS[quantity], justify="right", no_wrap=True)
        if quantity == STEP_TIME.column:
            table.add_column(
                f"{format_percent(comparison.settings.confidence, signed=False)} interval",
                justify="right",
                no_wrap=True,
            )
    table.add_column("verdict", no_wrap=True)
    verdict_order = {verdict: position for position, verdict in enumerate(VERDICTS)}
    for row in sorted(comparison.rows, key=lambda row: verdict_order[row.verdict]):
        first_cells = [
            row.name,
            *([row.evidence] if len(evidence_kinds) > 1 else []),
            files.format_run_counts(row),
            files.format_status(row),
        ]
        table.add_row(
            *first_cells, *_format_changes(row, shown_quantities), row.verdict, style=VERDICT_STYLES[row.verdict]
        )
    table.add_section()
    for overall in comparison.overall:
        first_cells = [
            f"all {overall.configurations} together",
            *([overall.evidence] if len(evidence_kinds) > 1 else []),
            "",
            "",
        ]
        table.add_row(
            *first_cells,
            *_format_changes(overall, shown_quantities),
            overall.verdict,
            style=f"bold {VERDICT_STYLES[overall.verdict]}".strip(),
        )
    return table


def _format_changes(row: ComparedConfiguration | OverallComparison, quantities: Sequence[str]) -> list[str]:
    cell_texts = []
    for quantity in quantities:
        change = row.get(quantity)
        cell_texts.append(files.format_change(change))
        if quantity == STEP_TIME.column:
            cell_texts.append(files.format_interval(change))
    return cell_texts


def _list_reasons(comparison: RunComparison) -> list[RenderableType]:
    """Why a verdict is what it is; one that many configurations share is told once."""
    members_by_reason: dict[str, list[str]] = {}
    for row in comparison.rows:
        if files.format_reasons(row):
            members_by_reason.setdefault(files.format_reasons(row), []).append(row.name)
    lines: list[RenderableType] = []
    for reason, members in members_by_reason.items():
        members_text = members[0] if len(members) == 1 else format_plural(len(members), "configuration")
        lines.append(Text(f"{members_text}: {reason}"))
    return lines


def build_history_tables(all_series: Sequence[HistorySeries]) -> RenderableType:
    """Every change point, and how long the histories are."""
    changes = _list_changes(all_series)
    configurations = {(series.evidence, series.name, series.device) for series in all_series}
    point_counts = [len(series.points) for series in all_series]
    parts: list[RenderableType] = []
    if changes:
        table = Table(box=None, pad_edge=False)
        for heading in ("configuration", "quantity", "changed at", "date", "after"):
            table.add_column(heading, overflow="fold")
        for heading in ("before", "since", "change"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for series, change in changes:
            table.add_row(*_format_change_cells(series, change), style=VERDICT_STYLES[change.verdict])
        parts += [table, *_list_other_changes(changes), Text()]
    length_text = (
        f"{min(point_counts)} to {max(point_counts)} points"
        if min(point_counts) < max(point_counts)
        else format_plural(point_counts[0], "point")
    )
    changes_text = format_plural(len(changes), "change") + " of level" if changes else "no change of level"
    parts.append(
        Text(
            f"{format_plural(len(configurations), 'configuration')}, {length_text} each: {changes_text}.", style="bold"
        )
    )
    return Group(*parts)


def _list_changes(all_series: Sequence[HistorySeries]) -> list[tuple[HistorySeries, ChangePoint]]:
    """Changes, each told once: TFLOPS say what the time says, reserved memory on a CPU what allocated memory says."""
    changes_by_key: dict[tuple[object, ...], tuple[HistorySeries, ChangePoint]] = {}
    for series in all_series:
        for change in series.change_points:
            subject = (
                "status"
                if change.change is None
                else {TFLOPS: STEP_TIME, RESERVED: ALLOCATED}.get(series.quantity, series.quantity)
            )
            change_key = (series.evidence, series.device, series.name, subject, change.index)
            changes_by_key.setdefault(change_key, (series, change))
    return list(changes_by_key.values())


def _format_change_cells(series: HistorySeries, change: ChangePoint) -> list[str]:
    is_status = change.change is None
    quantity = series.quantity.column
    levels = [
        str(level) if is_status else files.format_value(quantity, level) for level in (change.before, change.after)
    ]
    change_text = MISSING if change.change is None else format_percent(change.change)
    title = "status" if is_status else series.quantity.title
    return [series.name, title, change.commit, change.date, change.previous, *levels, change_text, change.verdict]


def _list_other_changes(changes: Sequence[tuple[HistorySeries, ChangePoint]]) -> list[RenderableType]:
    """What else changed at the same commits: machines first."""
    machine_changes = {
        f"{change.commit}: {difference}": None for _, change in changes for difference in change.machines
    }
    software_changes = {
        f"{change.commit}: {difference}": None
        for _, change in changes
        for difference in change.software
        if difference.name != "commit"
    }
    lines: list[RenderableType] = [Text(f"  the machine changed at {line}", style="red") for line in machine_changes]
    return lines + [Text(f"  also changed at {line}") for line in software_changes]
