"""A history as a folder to browse: a page with every configuration, its changes of level and links to its rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bench.comparison import ChangePoint, HistoryPoint, HistorySeries
from bench.comparison.result import format_percent
from bench.core.presentation import MISSING, build_slug, format_plural
from bench.records.packed_rows import ROWS_FILE
from bench.records.store import ATTEMPT_FILE_PATTERN, RUN_ID_PATTERN
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import Drawing, save_drawing
from bench.reporting.figures.history import format_change_sentence, pair_histories
from bench.reporting.regressions.files import format_history_json, format_value, write_texts

PAGE_FILE = "index.html"
TEMPLATE_FILE = "history.html.j2"

LINE_WIDTH, LINE_HEIGHT = 140, 28
"""Of the small picture of a series, in pixels."""

RowKey = tuple[str, int]


def write_history(all_series: Sequence[HistorySeries], folder: Path, stores: Sequence[Path] = ()) -> str:
    """Write the page, the figures and the data of histories; what there is now, in a sentence.

    Parameters
    ----------
    stores: sequence of Path
        Where the rows are that the page links to.

    Raises
    ------
    UsageError
        If something cannot be written.
    """
    write_texts({folder / "history.json": format_history_json(all_series)})
    with style.apply_report_style():
        pairs = pair_histories(all_series)
    for _, drawing in pairs:
        save_drawing(drawing, folder)
    write_texts({folder / PAGE_FILE: render_history_page(pairs, folder, stores)})
    return f"{folder / PAGE_FILE}: a page to browse, with {format_plural(len(pairs), 'figure')}"


def render_history_page(pairs: Sequence[tuple[HistorySeries, Drawing]], folder: Path, stores: Sequence[Path]) -> str:
    """The page of histories whose figures lie in `folder`, beside it."""
    links = _find_row_links(stores, folder)
    all_series = [_describe_series(series, drawing, links) for series, drawing in pairs]
    changes = [change for series in all_series for change in series["changes"]]
    changes.sort(key=lambda change: -abs(change["size"]))
    names = {(series.evidence, series.device, series.name) for series, _ in pairs}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        files("bench.reporting.regressions").joinpath(TEMPLATE_FILE).read_text(encoding="utf-8")
    )
    dates = sorted(point.date for series, _ in pairs for point in series.points)
    return template.render(
        title=", ".join(store.name for store in stores) or "runs",
        summary=f"{format_plural(len(names), 'configuration')} from {dates[0]} to {dates[-1]}: "
        f"{format_plural(len(changes), 'change')} of level.",
        changes=changes,
        all_series=all_series,
    )


def _describe_series(series: HistorySeries, drawing: Drawing, links: Mapping[RowKey, str]) -> dict[str, Any]:
    quantity = series.quantity.column
    values = [point.value for point in series.points if point.value is not None]
    anchor = build_slug(drawing.name)
    words = f"{series.name} {series.evidence} {series.device} {series.quantity.title}".lower()
    return {
        "anchor": anchor,
        "words": words,
        "name": series.name,
        "evidence": series.evidence,
        "device": series.device,
        "quantity": series.quantity.title,
        "figure": f"{drawing.name}.svg",
        "alt": drawing.alt,
        "line": _draw_line(series),
        "last": format_value(quantity, values[-1] if values else None),
        "since_first": format_percent(values[-1] / values[0] - 1) if values and values[0] else MISSING,
        "changes": [_describe_change(series, change, anchor, words) for change in series.change_points],
        "points": [_describe_point(quantity, point, links) for point in series.points],
    }


def _describe_change(series: HistorySeries, change: ChangePoint, anchor: str, words: str) -> dict[str, Any]:
    quantity = series.quantity.column
    is_status = change.change is None
    before, after = (
        str(level) if is_status else format_value(quantity, level) for level in (change.before, change.after)
    )
    return {
        "anchor": anchor,
        "words": words,
        "name": series.name,
        "quantity": "status" if is_status else series.quantity.title,
        "commit": change.commit,
        "date": change.date,
        "previous": change.previous,
        "before": before,
        "after": after,
        "change": MISSING if change.change is None else format_percent(change.change),
        "size": 1.0 if change.change is None else change.change,
        "verdict": change.verdict,
        "sentence": format_change_sentence(change),
    }


def _describe_point(quantity: str, point: HistoryPoint, links: Mapping[RowKey, str]) -> dict[str, Any]:
    statuses = ", ".join(f"{count} {status}" for status, count in point.statuses.items())
    return {
        "commit": point.commit,
        "date": point.date,
        "value": format_value(quantity, point.value),
        "range": ""
        if point.low is None
        else f"{format_value(quantity, point.low)} to {format_value(quantity, point.high)}",
        "runs": statuses + (f", {point.degraded} degraded" if point.degraded else ""),
        "rows": [
            {"name": f"{row['run_id'][:6]}/{row['attempt']}", "link": links.get((row["run_id"], row["attempt"]))}
            for row in point.rows
        ],
    }


def _draw_line(series: HistorySeries) -> Markup:
    """The values over time as a line, with a dot where the level changed."""
    values = [point.value for point in series.points]
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    scale = LINE_HEIGHT / (high - low) if high > low else 0.0

    def place(index: int) -> str:
        value = values[index]
        assert value is not None
        x = LINE_WIDTH * index / max(len(values) - 1, 1)
        return f"{x:.1f},{LINE_HEIGHT - scale * (value - low) if scale else LINE_HEIGHT / 2:.1f}"

    line = " ".join(place(index) for index, value in enumerate(values) if value is not None)
    dots = "".join(
        '<circle r="3" cx="{}" cy="{}"/>'.format(*place(change.index).split(","))
        for change in series.change_points
        if values[change.index] is not None
    )
    return Markup('<svg class="line" aria-hidden="true" viewBox="0 0 {} {}"><polyline points="{}"/>{}</svg>').format(
        LINE_WIDTH, LINE_HEIGHT, line, Markup(dots)
    )


def _find_row_links(stores: Sequence[Path], folder: Path) -> dict[RowKey, str]:
    """Where the row of each attempt is, relative to the page; a line of a packed store is a fragment of its file."""
    links: dict[RowKey, str] = {}
    for store in stores:
        for file in store.rglob("*.json"):
            match = ATTEMPT_FILE_PATTERN.match(file.name)
            if match and RUN_ID_PATTERN.match(file.parent.name):
                links[file.parent.name, int(file.stem)] = os.path.relpath(file, folder)
        for file in store.rglob(ROWS_FILE):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                row = json.loads(line)
                row = json.loads(line)
                if "run_id" in row:  # not the heading
                    links[row["run_id"], row.get("attempt", 0)] = f"{os.path.relpath(file, folder)}#L{number}"
    return links
