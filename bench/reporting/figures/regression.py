"""Changes between two sets of rows with their confidence intervals: a lane per configuration, and one for all.

Drawn from what `bench.comparison` found, like the figures of `detectable` and `history`, which can be had from here as
well; none of them is part of a store's report.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.comparison import Comparison, Settings
from bench.comparison.result import Change
from bench.comparison.words import (
    ALLOCATED,
    CANNOT_TELL,
    IMPROVEMENT,
    REGRESSION,
    RESERVED,
    TFLOPS,
    TIME,
    Quantity,
    percent,
)
from bench.reporting import labels, lanes, style
from bench.reporting.drawing import Drawing
from bench.reporting.figures.detectable import detectable_drawing, detectable_table
from bench.reporting.figures.history import history_drawing, history_drawings
from bench.reporting.figures.verdicts import LOOKS
from bench.reporting.labels import slug

__all__ = ["change_drawings", "detectable_drawing", "detectable_table", "history_drawing", "history_drawings"]

BAND_COLOUR = "#ececec"
TOGETHER = "all together"


def change_drawings(comparison: Comparison, quantity: Quantity = TIME) -> list[Drawing]:
    """The change of every configuration with its confidence interval, and of all together: one figure or more."""
    rows = [_change_row(row.name, row.evidence, row.get(quantity.column), row["status"]) for row in comparison.rows]
    rows += [
        _change_row(TOGETHER, each.evidence, each.get(quantity.column), None)
        for each in comparison.overall
        if each.get(quantity.column) and each.configurations > 1
    ]
    frame = pd.DataFrame([row for row in rows if row["change"] is not None or row["words"]])
    if frame.empty:
        return []
    kinds = {kind: position for position, kind in enumerate(style.EVIDENCE_STYLES)}
    frame = frame.sort_values("evidence", kind="stable", key=lambda column: column.map(kinds))
    pages = list(lanes.paginate(frame, lambda row: str(row["name"])))
    limits = _limits(frame, comparison.settings)
    return [
        _changes(groups, comparison, quantity, limits, number, len(pages)) for number, groups in enumerate(pages, 1)
    ]


def _change_row(name: str, evidence: str, change: Change | None, status: Change | None) -> dict[str, Any]:
    """A lane: a change, or what became of the runs if they have no value to compare."""
    changed = status is not None and status.verdict in (REGRESSION, IMPROVEMENT)
    verdict = status.verdict if changed and status else change.verdict if change else CANNOT_TELL
    value, low, high = (None, None, None) if change is None else (change.change, change.low, change.high)
    degraded = "degraded" if change is not None and value is None else ""
    return {
        "heading": evidence,
        "name": name,
        "evidence": evidence,
        "verdict": verdict,
        "change": value,
        "low": value if low is None else low,
        "high": value if high is None else high,
        "words": f"{status.base} → {status.candidate}" if changed and status else degraded,
    }


def _limits(frame: pd.DataFrame, settings: Settings) -> tuple[float, float]:
    """Ends of the axis in percent, the same on every page; far ends of intervals are cut."""
    points = frame["change"].dropna().astype(float)
    ends = pd.concat([frame["low"], frame["high"]]).dropna().astype(float)
    widest = max(0.5, 3 * float(points.abs().max()) if len(points) else 0.5)
    low = min(-2 * settings.threshold, max(float(ends.min()), -widest) if len(ends) else 0.0)
    high = max(2 * settings.threshold, min(float(ends.max()), widest) if len(ends) else 0.0)
    return 108 * low, 108 * high


def _changes(
    groups: list[lanes.Group],
    comparison: Comparison,
    quantity: Quantity,
    limits: tuple[float, float],
    page: int,
    pages: int,
) -> Drawing:
    settings = comparison.settings
    part = f" ({page} of {pages})" if pages > 1 else ""
    title = f"Change of {quantity.title}, candidate against base{part}"
    subtitle = comparison.sentence
    if comparison.machines:
        subtitle = f"DIFFERENT MACHINES ({'; '.join(str(each) for each in comparison.machines)})\n{subtitle}"
    shown = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    threshold = {ALLOCATED: settings.memory_threshold, RESERVED: settings.reserved_threshold}.get(
        quantity, settings.threshold
    )
    key = _verdict_key(shown["verdict"])
    if (shown["words"] == "degraded").any():
        triangle = Line2D([], [], color=style.INK, marker="v", linestyle="", markerfacecolor="white", markersize=7)
        key.append((triangle, "degraded: not compared"))
    if (shown["change"].isna() & (shown["words"] != "degraded")).any():
        cross = Line2D([], [], color=style.OOM_COLOUR, marker="X", linestyle="", markeredgecolor="white", markersize=8)
        key.append((cross, "no value on one side: status"))
    key.append((Patch(facecolor=BAND_COLOUR), f"below {percent(threshold, signed=False)}: does not count"))
    figure, axes = lanes.axes_for(groups, title, subtitle, key, width_in=style.WIDTH_IN)
    axes.axvspan(-100 * threshold, 100 * threshold, color=BAND_COLOUR, zorder=0)
    axes.axvline(0, color=style.MUTED, linewidth=1.0, zorder=1)
    low, high = limits
    axes.set_xlim(low, high + 0.22 * (high - low))
    for group in groups:
        for lane in group.lanes:
            _lane(axes, lane, limits)
    axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= high])
    axes.xaxis.set_major_formatter(lambda value, _: "0" if abs(value) < 1e-9 else f"{value:+g}".replace("-", "−"))
    axes.set_xlabel(f"change of {quantity.title} (%), {_direction_words(quantity)}", loc="left")
    told = [
        f"{row['name']}: {row['words'] or percent(row['change'])}, {row['verdict']}" for row in shown.to_dict("records")
    ]
    alt = f"Changes of {quantity.title} with confidence intervals. {labels.listing(told, 8)}."
    level = percent(settings.confidence, signed=False)
    interval = f"{level} confidence intervals, each by itself; verdicts allow for their number."
    caption = f"{title}. {interval if quantity in (TIME, TFLOPS) else 'Memory repeats, so it has no interval.'}"
    return Drawing(slug("change", quantity.title, str(page) if pages > 1 else ""), title, figure, caption, alt)


def _direction_words(quantity: Quantity) -> str:
    return "more is worse" if quantity.worse > 0 else "less is worse"


def _lane(axes: Axes, lane: lanes.Lane, limits: tuple[float, float]) -> None:
    row = lane.row
    look = LOOKS[row["verdict"]]
    words = row["words"]
    if pd.notna(row["change"]):
        point, low, high = (100 * float(row[name]) for name in ("change", "low", "high"))
        ends = max(low, limits[0]), min(high, limits[1])
        if high > low:
            line = style.EVIDENCE_STYLES[row["evidence"]].line
            axes.plot(
                ends,
                [lane.y] * 2,
                color=look["color"],
                linewidth=2.4 if row["name"] == TOGETHER else 1.4,
                linestyle=line,
            )
        for end, beyond, marker in ((limits[0], low < limits[0], "<"), (limits[1], high > limits[1], ">")):
            if beyond:
                axes.plot(end, lane.y, marker, color=look["color"], markersize=5)
        if limits[0] <= point <= limits[1]:
            axes.plot(point, lane.y, linestyle="", markersize=8 if row["name"] == TOGETHER else 6, zorder=4, **look)
        words = f"{percent(float(row['change']))}{', ' + words if words else ''}"
    elif words == "degraded":
        axes.plot(0, lane.y, "v", markersize=7, markerfacecolor="white", markeredgecolor=style.INK, zorder=5)
    else:
        axes.plot(0, lane.y, "X", markersize=8, color=style.OOM_COLOUR, markeredgecolor="white", zorder=5)
    axes.annotate(
        words, (limits[1], lane.y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=7.5,
        fontweight="bold" if row["verdict"] in (REGRESSION, IMPROVEMENT) else "normal",
    )  # fmt: skip


def _verdict_key(verdicts: pd.Series) -> list[tuple[Artist, str]]:
    return [
        (Line2D([], [], linewidth=1.4, markersize=6, **look), verdict)
        for verdict, look in LOOKS.items()
        if verdict in set(verdicts)
    ]
