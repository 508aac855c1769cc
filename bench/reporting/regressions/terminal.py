"""A comparison and a history as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.comparison.history import ChangePoint, Series
from bench.comparison.result import Comparison, Overall, Row
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
    percent,
)
from bench.reporting.labels import MISSING, counted
from bench.reporting.regressions import cells

STYLES = {REGRESSION: "bold red", IMPROVEMENT: "green", NO_CHANGE: "", CANNOT_TELL: "yellow"}
MOST_UNMATCHED = 12
"""Lines on what only one side has, unless all are asked for."""


def comparison_tables(comparison: Comparison, *, everything: bool = False) -> RenderableType:
    """Differences of machines first, then every configuration, all together, and what could not be compared."""
    parts: list[RenderableType] = []
    if comparison.machines:
        told = "compared all the same" if comparison.settings.across_machines else "times are not compared"
        parts.append(Text(f"The machines differ ({told}):", style="bold red"))
        parts += [Text(f"  {difference}", style="red") for difference in comparison.machines]
    if comparison.software:
        parts.append(Text("What changed between base and candidate:"))
        parts += [Text(f"  {difference}") for difference in comparison.software]
    if comparison.rows:
        parts += [Text(), _table(comparison), Text()]
        parts += _reasons(comparison)
    lines = cells.unmatched(comparison)
    parts += [Text(line) for line in (lines if everything else lines[:MOST_UNMATCHED])]
    if len(lines) > MOST_UNMATCHED and not everything:
        parts.append(Text(f"  and {len(lines) - MOST_UNMATCHED} more: --all shows them", style="dim"))
    parts += [Text(f"Note: {note}.") for note in comparison.notes]
    if comparison.rows:
        parts.append(Text(cells.settings_sentence(comparison), style="dim"))
    parts.append(Text(comparison.sentence, style=f"bold {STYLES[comparison.verdict]}".strip()))
    return Group(*parts)


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    shown = cells.shown(comparison)
    kinds = {row.evidence for row in comparison.rows}
    table.add_column("configuration", overflow="fold")
    if len(kinds) > 1:
        table.add_column("evidence")
    table.add_column("runs", justify="right")
    table.add_column("status")
    for quantity in shown:
        table.add_column(cells.COLUMNS[quantity], justify="right", no_wrap=True)
        if quantity == TIME.column:
            table.add_column(
                f"{percent(comparison.settings.confidence, signed=False)} interval", justify="right", no_wrap=True
            )
    table.add_column("verdict", no_wrap=True)
    order = {verdict: position for position, verdict in enumerate(VERDICTS)}
    for row in sorted(comparison.rows, key=lambda row: order[row.verdict]):
        start = [row.name, *([row.evidence] if len(kinds) > 1 else []), cells.runs(row), cells.status(row)]
        table.add_row(*start, *_numbers(row, shown), row.verdict, style=STYLES[row.verdict])
    table.add_section()
    for overall in comparison.overall:
        start = [f"all {overall.configurations} together", *([overall.evidence] if len(kinds) > 1 else []), "", ""]
        table.add_row(
            *start, *_numbers(overall, shown), overall.verdict, style=f"bold {STYLES[overall.verdict]}".strip()
        )
    return table


def _numbers(row: Row | Overall, shown: Sequence[str]) -> list[str]:
    found = []
    for quantity in shown:
        each = row.get(quantity)
        found.append(cells.change(each))
        if quantity == TIME.column:
            found.append(cells.interval(each))
    return found


def _reasons(comparison: Comparison) -> list[RenderableType]:
    """Why a verdict is what it is; one that many configurations share is told once."""
    found: dict[str, list[str]] = {}
    for row in comparison.rows:
        if cells.why(row):
            found.setdefault(cells.why(row), []).append(row.name)
    lines: list[RenderableType] = []
    for reason, members in found.items():
        who = members[0] if len(members) == 1 else counted(len(members), "configuration")
        lines.append(Text(f"{who}: {reason}"))
    return lines


def history_tables(found: Sequence[Series]) -> RenderableType:
    """Every change point, and how long the histories are."""
    changed = _changed(found)
    configurations = {(series.evidence, series.name, series.device) for series in found}
    points = [len(series.points) for series in found]
    parts: list[RenderableType] = []
    if changed:
        table = Table(box=None, pad_edge=False)
        for heading in ("configuration", "quantity", "changed at", "date", "after"):
            table.add_column(heading, overflow="fold")
        for heading in ("before", "since", "change"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for series, change in changed:
            table.add_row(*_change_cells(series, change), style=STYLES[change.verdict])
        parts += [table, *_also(changed), Text()]
    length = f"{min(points)} to {max(points)} points" if min(points) < max(points) else counted(points[0], "point")
    told = counted(len(changed), "change") + " of level" if changed else "no change of level"
    parts.append(Text(f"{counted(len(configurations), 'configuration')}, {length} each: {told}.", style="bold"))
    return Group(*parts)


def _changed(found: Sequence[Series]) -> list[tuple[Series, ChangePoint]]:
    """Changes, each told once: TFLOPS say what the time says, reserved memory on a CPU what allocated memory says."""
    once: dict[tuple[object, ...], tuple[Series, ChangePoint]] = {}
    for series in found:
        for change in series.change_points:
            subject = (
                "status"
                if change.change is None
                else {TFLOPS: TIME, RESERVED: ALLOCATED}.get(series.quantity, series.quantity)
            )
            where = (series.evidence, series.device, series.name, subject, change.index)
            once.setdefault(where, (series, change))
    return list(once.values())


def _change_cells(series: Series, change: ChangePoint) -> list[str]:
    status = change.change is None
    quantity = series.quantity.column
    levels = [str(level) if status else cells.value(quantity, level) for level in (change.before, change.after)]
    told = MISSING if change.change is None else percent(change.change)
    title = "status" if status else series.quantity.title
    return [series.name, title, change.commit, change.date, change.previous, *levels, told, change.verdict]


def _also(changed: Sequence[tuple[Series, ChangePoint]]) -> list[RenderableType]:
    """What else changed at the same commits: machines first."""
    machines = {f"{change.commit}: {each}": None for _, change in changed for each in change.machines}
    software = {
        f"{change.commit}: {each}": None for _, change in changed for each in change.software if each.name != "commit"
    }
    lines: list[RenderableType] = [Text(f"  the machine changed at {line}", style="red") for line in machines]
    return lines + [Text(f"  also changed at {line}") for line in software]
