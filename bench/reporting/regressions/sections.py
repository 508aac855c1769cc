"""Regressions as sections that a page or a notebook shows: a comparison, a history, and what can be detected at all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from bench.comparison import ComparisonSettings, QuantityChange, RunComparison, build_histories, compare_records
from bench.comparison.result import ALLOCATED, STEP_TIME, format_percent
from bench.core.presentation import MISSING, format_list, format_number
from bench.records import Record, read_all_attempts
from bench.reporting.builder import read_store
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import FigureTable, ReportSection
from bench.reporting.figures.detectable import build_detectable_table, draw_detectable_slowdowns
from bench.reporting.figures.history import draw_histories
from bench.reporting.figures.regression import draw_changes

CHANGES_HOW_TO_READ = (
    "Every mark is one configuration: the change of its median step time from base to candidate, with its confidence "
    "interval. The repeated run is the unit: a change is called a regression only if it is large enough to matter and "
    "significant over the runs, corrected for the number of configurations."
)
HISTORY_HOW_TO_READ = (
    "Runs in order of time, by commit. A vertical line is a change of level that is found beyond the scatter of the "
    "runs, named by the first commit that was run with the new level."
)
DETECTABLE_HOW_TO_READ = (
    "Across: how often each side is run. Up: the smallest true slowdown that is then found 95 times in 100. A line per "
    "spread, the standard deviation of the step time from run to run."
)
NO_BASE_MESSAGE = (
    "Nothing to compare was given. Set BASE and STORE in the first cell, or type: python -m bench.notebooks "
    "regressions base=BEFORE store=AFTER. On its own, python -m bench.compare BEFORE AFTER says the same, and has an "
    "exit code."
)
NO_STORE_MESSAGE = (
    "No store of your own was given: python -m bench.notebooks regressions store=DIR draws its history here."
)


def build_change_section(
    base: Sequence[Record], candidate: Sequence[Record], settings: ComparisonSettings | None = None
) -> ReportSection:
    """Two sets of rows compared: the verdict, a figure of times, one of memory where there is a change, and a table."""
    comparison = compare_records(base, candidate, settings)
    differences = format_list([str(difference) for difference in (*comparison.machines, *comparison.software)])
    summary = f"{comparison.sentence} " + (f"What differs between the two: {differences}. " if differences else "")
    section = ReportSection(
        "changes", "Candidate against base", summary + (CHANGES_HOW_TO_READ if comparison.rows else "")
    )
    with style.apply_report_style():
        drawings = draw_changes(comparison, STEP_TIME)
        if any(change.change for row in comparison.rows if (change := row.get(ALLOCATED.column)) is not None):
            drawings += draw_changes(comparison, ALLOCATED)
    for drawing in drawings:
        section.plan_figure(lambda finished_drawing: finished_drawing, drawing)
    if comparison.rows:
        section.tables.append(_build_change_table(comparison))
    return section


def _build_change_table(comparison: RunComparison) -> FigureTable:
    columns = ["Configuration", "Evidence", "Runs", "Spread", "Change", "Interval", "Detectable", "Verdict", "Because"]
    rows = []
    for row in comparison.rows:
        time_change = row.get(STEP_TIME.column)
        has_change = time_change is not None and time_change.change is not None
        rows.append(
            [
                row.name,
                row.evidence,
                f"{time_change.base_runs}, {time_change.candidate_runs}" if time_change else MISSING,
                _format_percent(time_change.spread if time_change else None),
                _format_percent(time_change.change if time_change else None, signed=True),
                _format_interval(time_change)
                if time_change and has_change and time_change.low is not None
                else MISSING,
                _format_percent(time_change.detectable if time_change else None),
                row.verdict,
                "; ".join(row.reasons),
            ]
        )
    return FigureTable("As a table: step times", columns, rows, frozenset(columns[2:7]))


def _format_interval(change: QuantityChange) -> str:
    return f"{_format_percent(change.low, signed=True)} to {_format_percent(change.high, signed=True)}"


def _format_percent(share: float | None, *, signed: bool = False) -> str:
    return MISSING if share is None else format_percent(share, signed=signed)


def build_store_change_section(
    base: str | Path | None, candidate: str | Path | None, settings: ComparisonSettings | None = None
) -> ReportSection:
    """`build_change_section` between two stores; if one is not given, how to give it.

    Raises
    ------
    UsageError
        If there is no such store or it holds no rows.
    """
    if base is None or candidate is None:
        return ReportSection("changes", "Candidate against base", "", notice=NO_BASE_MESSAGE)
    return build_change_section(read_store(base).records, read_store(candidate).records, settings)


def build_history_section(store: str | Path | None, settings: ComparisonSettings | None = None) -> ReportSection:
    """The history of every configuration of a store that was run at several commits or on several days.

    Raises
    ------
    UsageError
        If there is no such store or it holds no rows.
    """
    section = ReportSection("history", "Over commits", HISTORY_HOW_TO_READ)
    if store is None:
        return ReportSection("history", "Over commits", "", notice=NO_STORE_MESSAGE)
    histories = build_histories(read_store(store, read_all_attempts).records, settings)
    with style.apply_report_style():
        for drawing in draw_histories(histories):
            section.plan_figure(lambda finished_drawing: finished_drawing, drawing)
    if not histories:
        section.notice = "No configuration of this store was run at more than one commit, version or day."
    return section


def build_detectable_section(configurations: int = 1, settings: ComparisonSettings | None = None) -> ReportSection:
    """The curves of detectable change against repeats and spread, and their numbers."""
    section = ReportSection("detectable", "What can be found", DETECTABLE_HOW_TO_READ)
    section.plan_figure(functools.partial(draw_detectable_slowdowns, configurations=configurations, settings=settings))
    table = build_detectable_table(configurations=configurations, settings=settings)
    columns = [
        "Runs of each side",
        *(f"spread {format_percent(float(spread), signed=False)}" for spread in table.columns),
    ]
    rows = [
        [str(repeats), *(f"{format_number(100 * value, 2)} %" for value in values)]
        for repeats, values in zip(table.index, table.to_numpy(float), strict=True)
    ]
    section.tables.append(FigureTable("As a table: detectable slowdown", columns, rows, frozenset(columns)))
    return section
