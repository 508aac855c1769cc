"""Regressions as sections that a page or a notebook shows: a comparison, a history, and what can be detected at all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from bench.comparison import Change, Comparison, Settings, compare, history
from bench.comparison.words import ALLOCATED, TIME, percent
from bench.records import Record, read_attempts
from bench.reporting import style
from bench.reporting.drawing import Listing, Section
from bench.reporting.figures.detectable import detectable_drawing, detectable_table
from bench.reporting.figures.history import history_drawings
from bench.reporting.figures.regression import change_drawings
from bench.reporting.labels import MISSING, listing, number
from bench.reporting.reading import read_store

CHANGES = (
    "Every mark is one configuration: the change of its median step time from base to candidate, with its confidence "
    "interval. The repeated run is the unit: a change is called a regression only if it is large enough to matter and "
    "significant over the runs, corrected for the number of configurations."
)
OVER_TIME = (
    "Runs in order of time, by commit. A vertical line is a change of level that is found beyond the scatter of the "
    "runs, named by the first commit that was run with the new level."
)
DETECTABLE = (
    "Across: how often each side is run. Up: the smallest true slowdown that is then found 95 times in 100. A line per "
    "spread, the standard deviation of the step time from run to run."
)
NO_BASE = (
    "Nothing to compare was given. Set BASE and STORE in the first cell, or type: python -m bench.notebooks "
    "regressions base=BEFORE store=AFTER. On its own, python -m bench.compare BEFORE AFTER says the same, and has an "
    "exit code."
)
NO_STORE = "No store of your own was given: python -m bench.notebooks regressions store=DIR draws its history here."


def changes(base: Sequence[Record], candidate: Sequence[Record], settings: Settings | None = None) -> Section:
    """Two sets of rows compared: the verdict, a figure of times, one of memory where there is a change, and a table."""
    found = compare(base, candidate, settings)
    different = listing([str(each) for each in (*found.machines, *found.software)])
    said = f"{found.sentence} " + (f"What differs between the two: {different}. " if different else "")
    result = Section("changes", "Candidate against base", said + (CHANGES if found.rows else ""))
    with style.context():
        drawings = change_drawings(found, TIME)
        if any(change.change for row in found.rows if (change := row.get(ALLOCATED.column)) is not None):
            drawings += change_drawings(found, ALLOCATED)
    for drawing in drawings:
        result.plan(lambda done: done, drawing)
    if found.rows:
        result.listings.append(_listing(found))
    return result


def _listing(found: Comparison) -> Listing:
    columns = ["Configuration", "Evidence", "Runs", "Spread", "Change", "Interval", "Detectable", "Verdict", "Because"]
    rows = []
    for row in found.rows:
        time = row.get(TIME.column)
        known = time is not None and time.change is not None
        rows.append(
            [
                row.name,
                row.evidence,
                f"{time.base_runs}, {time.candidate_runs}" if time else MISSING,
                _percent(time.spread if time else None),
                _percent(time.change if time else None, signed=True),
                _interval(time) if time and known and time.low is not None else MISSING,
                _percent(time.detectable if time else None),
                row.verdict,
                "; ".join(row.reasons),
            ]
        )
    return Listing("As a table: step times", columns, rows, frozenset(columns[2:7]))


def _interval(change: Change) -> str:
    return f"{_percent(change.low, signed=True)} to {_percent(change.high, signed=True)}"


def _percent(share: float | None, *, signed: bool = False) -> str:
    return MISSING if share is None else percent(share, signed=signed)


def of_stores(base: str | Path | None, candidate: str | Path | None, settings: Settings | None = None) -> Section:
    """`changes` between two stores; if one is not given, how to give it.

    Raises
    ------
    UsageError
        If there is no such store or it holds no rows.
    """
    if base is None or candidate is None:
        return Section("changes", "Candidate against base", "", nothing=NO_BASE)
    return changes(read_store(base).records, read_store(candidate).records, settings)


def over_time(store: str | Path | None, settings: Settings | None = None) -> Section:
    """The history of every configuration of a store that was run at several commits or on several days.

    Raises
    ------
    UsageError
        If there is no such store or it holds no rows.
    """
    result = Section("history", "Over commits", OVER_TIME)
    if store is None:
        return Section("history", "Over commits", "", nothing=NO_STORE)
    found = history(read_store(store, read_attempts).records, settings)
    with style.context():
        for drawing in history_drawings(found):
            result.plan(lambda done: done, drawing)
    if not found:
        result.nothing = "No configuration of this store was run at more than one commit, version or day."
    return result


def detectable(configurations: int = 1, settings: Settings | None = None) -> Section:
    """The curves of detectable change against repeats and spread, and their numbers."""
    result = Section("detectable", "What can be found", DETECTABLE)
    result.plan(functools.partial(detectable_drawing, configurations=configurations, settings=settings))
    table = detectable_table(configurations=configurations, settings=settings)
    columns = ["Runs of each side", *(f"spread {percent(float(spread), signed=False)}" for spread in table.columns)]
    rows = [
        [str(repeats), *(f"{number(100 * value, 2)} %" for value in values)]
        for repeats, values in zip(table.index, table.to_numpy(float), strict=True)
    ]
    result.listings.append(Listing("As a table: detectable slowdown", columns, rows, frozenset(columns)))
    return result
