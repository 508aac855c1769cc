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

from bench.comparison import ComparisonSettings, RunComparison
from bench.comparison.result import (
    ALLOCATED,
    CANNOT_TELL,
    IMPROVEMENT,
    REGRESSION,
    RESERVED,
    STEP_TIME,
    TFLOPS,
    ComparedQuantity,
    QuantityChange,
    format_percent,
)
from bench.core import presentation
from bench.core.presentation import build_slug
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import Drawing
from bench.reporting.figures.detectable import build_detectable_table, draw_detectable_slowdowns
from bench.reporting.figures.history import draw_histories, draw_history
from bench.reporting.figures.verdicts import VERDICT_STYLES

__all__ = ["build_detectable_table", "draw_changes", "draw_detectable_slowdowns", "draw_histories", "draw_history"]

BAND_COLOUR = "#ececec"
OVERALL_NAME = "all together"


def draw_changes(comparison: RunComparison, quantity: ComparedQuantity = STEP_TIME) -> list[Drawing]:
    """The change of every configuration with its confidence interval, and of all together: one figure or more."""
    lane_rows = [
        _build_lane_row(
            configuration.name, configuration.evidence, configuration.get(quantity.column), configuration["status"]
        )
        for configuration in comparison.rows
    ]
    lane_rows += [
        _build_lane_row(OVERALL_NAME, overall.evidence, overall.get(quantity.column), None)
        for overall in comparison.overall
        if overall.get(quantity.column) and overall.configurations > 1
    ]
    frame = pd.DataFrame([lane_row for lane_row in lane_rows if lane_row["change"] is not None or lane_row["words"]])
    if frame.empty:
        return []
    evidence_order = {evidence: position for position, evidence in enumerate(style.EVIDENCE_STYLES)}
    frame = frame.sort_values("evidence", kind="stable", key=lambda column: column.map(evidence_order))
    pages = list(lanes.paginate_lanes(frame, lambda row: str(row["name"])))
    x_limits = _compute_x_limits(frame, comparison.settings)
    return [
        _draw_change_page(groups, comparison, quantity, x_limits, page_number, len(pages))
        for page_number, groups in enumerate(pages, 1)
    ]


def _build_lane_row(
    name: str, evidence: str, change: QuantityChange | None, status: QuantityChange | None
) -> dict[str, Any]:
    """A lane: a change, or what became of the runs if they have no value to compare."""
    is_status_changed = status is not None and status.verdict in (REGRESSION, IMPROVEMENT)
    verdict = status.verdict if is_status_changed and status else change.verdict if change else CANNOT_TELL
    value, low, high = (None, None, None) if change is None else (change.change, change.low, change.high)
    degraded_text = "degraded" if change is not None and value is None else ""
    return {
        "heading": evidence,
        "name": name,
        "evidence": evidence,
        "verdict": verdict,
        "change": value,
        "low": value if low is None else low,
        "high": value if high is None else high,
        "words": f"{status.base} → {status.candidate}" if is_status_changed and status else degraded_text,
    }


def _compute_x_limits(frame: pd.DataFrame, settings: ComparisonSettings) -> tuple[float, float]:
    """Ends of the axis in percent, the same on every page; far ends of intervals are cut."""
    changes = frame["change"].dropna().astype(float)
    interval_ends = pd.concat([frame["low"], frame["high"]]).dropna().astype(float)
    max_extent = max(0.5, 3 * float(changes.abs().max()) if len(changes) else 0.5)
    low = min(-2 * settings.threshold, max(float(interval_ends.min()), -max_extent) if len(interval_ends) else 0.0)
    high = max(2 * settings.threshold, min(float(interval_ends.max()), max_extent) if len(interval_ends) else 0.0)
    return 108 * low, 108 * high


def _draw_change_page(
    groups: list[lanes.LaneGroup],
    comparison: RunComparison,
    quantity: ComparedQuantity,
    x_limits: tuple[float, float],
    page_number: int,
    num_pages: int,
) -> Drawing:
    settings = comparison.settings
    page_suffix = f" ({page_number} of {num_pages})" if num_pages > 1 else ""
    title = f"Change of {quantity.title}, candidate against base{page_suffix}"
    subtitle = comparison.sentence
    if comparison.machines:
        subtitle = (
            f"DIFFERENT MACHINES ({'; '.join(str(difference) for difference in comparison.machines)})\n{subtitle}"
        )
    shown_rows = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    threshold = {ALLOCATED: settings.memory_threshold, RESERVED: settings.reserved_threshold}.get(
        quantity, settings.threshold
    )
    legend_entries = _build_verdict_legend(shown_rows["verdict"])
    if (shown_rows["words"] == "degraded").any():
        triangle_handle = Line2D(
            [], [], color=style.INK_COLOUR, marker="v", linestyle="", markerfacecolor="white", markersize=7
        )
        legend_entries.append((triangle_handle, "degraded: not compared"))
    if (shown_rows["change"].isna() & (shown_rows["words"] != "degraded")).any():
        cross_handle = Line2D(
            [], [], color=style.OOM_COLOUR, marker="X", linestyle="", markeredgecolor="white", markersize=8
        )
        legend_entries.append((cross_handle, "no value on one side: status"))
    legend_entries.append(
        (Patch(facecolor=BAND_COLOUR), f"below {format_percent(threshold, signed=False)}: does not count")
    )
    figure, axes = lanes.build_lane_axes(groups, title, subtitle, legend_entries, width_in=style.FIGURE_WIDTH_IN)
    axes.axvspan(-100 * threshold, 100 * threshold, color=BAND_COLOUR, zorder=0)
    axes.axvline(0, color=style.MUTED_COLOUR, linewidth=1.0, zorder=1)
    low, high = x_limits
    axes.set_xlim(low, high + 0.22 * (high - low))
    for group in groups:
        for lane in group.lanes:
            _draw_lane(axes, lane, x_limits)
    axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= high])
    axes.xaxis.set_major_formatter(lambda value, _: "0" if abs(value) < 1e-9 else f"{value:+g}".replace("-", "−"))
    axes.set_xlabel(f"change of {quantity.title} (%), {_format_direction(quantity)}", loc="left")
    change_texts = [
        f"{row['name']}: {row['words'] or format_percent(row['change'])}, {row['verdict']}"
        for row in shown_rows.to_dict("records")
    ]
    alt_text = f"Changes of {quantity.title} with confidence intervals. {presentation.format_list(change_texts, 8)}."
    confidence_text = format_percent(settings.confidence, signed=False)
    interval_note = f"{confidence_text} confidence intervals, each by itself; verdicts allow for their number."
    caption = (
        f"{title}. {interval_note if quantity in (STEP_TIME, TFLOPS) else 'Memory repeats, so it has no interval.'}"
    )
    return Drawing(
        build_slug("change", quantity.title, str(page_number) if num_pages > 1 else ""),
        title,
        figure,
        caption,
        alt_text,
    )


def _format_direction(quantity: ComparedQuantity) -> str:
    return "more is worse" if quantity.worse_direction > 0 else "less is worse"


def _draw_lane(axes: Axes, lane: lanes.Lane, x_limits: tuple[float, float]) -> None:
    row = lane.row
    verdict_style = VERDICT_STYLES[row["verdict"]]
    note_text = row["words"]
    if pd.notna(row["change"]):
        point, low, high = (100 * float(row[name]) for name in ("change", "low", "high"))
        line_ends = max(low, x_limits[0]), min(high, x_limits[1])
        if high > low:
            line_style = style.EVIDENCE_STYLES[row["evidence"]].linestyle
            axes.plot(
                line_ends,
                [lane.y] * 2,
                color=verdict_style["color"],
                linewidth=2.4 if row["name"] == OVERALL_NAME else 1.4,
                linestyle=line_style,
            )
        for limit, is_beyond, marker in ((x_limits[0], low < x_limits[0], "<"), (x_limits[1], high > x_limits[1], ">")):
            if is_beyond:
                axes.plot(limit, lane.y, marker, color=verdict_style["color"], markersize=5)
        if x_limits[0] <= point <= x_limits[1]:
            axes.plot(
                point,
                lane.y,
                linestyle="",
                markersize=8 if row["name"] == OVERALL_NAME else 6,
                zorder=4,
                **verdict_style,
            )
        note_text = f"{format_percent(float(row['change']))}{', ' + note_text if note_text else ''}"
    elif note_text == "degraded":
        axes.plot(0, lane.y, "v", markersize=7, markerfacecolor="white", markeredgecolor=style.INK_COLOUR, zorder=5)
    else:
        axes.plot(0, lane.y, "X", markersize=8, color=style.OOM_COLOUR, markeredgecolor="white", zorder=5)
    axes.annotate(
        note_text, (x_limits[1], lane.y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=7.5,
        fontweight="bold" if row["verdict"] in (REGRESSION, IMPROVEMENT) else "normal",
    )  # fmt: skip


def _build_verdict_legend(verdicts: pd.Series) -> list[tuple[Artist, str]]:
    return [
        (Line2D([], [], linewidth=1.4, markersize=6, **verdict_style), verdict)
        for verdict, verdict_style in VERDICT_STYLES.items()
        if verdict in set(verdicts)
    ]
