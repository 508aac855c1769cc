"""A quantity of one configuration over commits and dates: levels, change points, degraded and failed runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.comparison import ChangePoint, HistorySeries
from bench.comparison.result import ALLOCATED, QUANTITIES, RESERVED, STEP_TIME, TFLOPS, ComparedQuantity, format_percent
from bench.core import presentation
from bench.core.presentation import build_slug, format_plural
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import Drawing, compute_header_height_in, create_figure, draw_header
from bench.reporting.figures.verdicts import VERDICT_STYLES

MAX_TICKS = 9
MAX_LABEL_LINES = 5
"""Lines of words on changes, one below the other."""


def draw_histories(
    all_series: Sequence[HistorySeries], quantities: Sequence[ComparedQuantity] = QUANTITIES
) -> list[Drawing]:
    """The figures of `pair_histories`."""
    return [drawing for _, drawing in pair_histories(all_series, quantities)]


def pair_histories(
    all_series: Sequence[HistorySeries], quantities: Sequence[ComparedQuantity] = QUANTITIES
) -> list[tuple[HistorySeries, Drawing]]:
    """One figure per configuration and quantity; reserved memory only where it is not the same as allocated."""
    allocated_series = {
        (series.evidence, series.device, series.name): series for series in all_series if series.quantity == ALLOCATED
    }
    pairs = []
    for series in all_series:
        allocated_twin = allocated_series.get((series.evidence, series.device, series.name))
        is_same = allocated_twin is not None and [point.value for point in allocated_twin.points] == [
            point.value for point in series.points
        ]
        if series.quantity in quantities and not (series.quantity == RESERVED and is_same):
            pairs.append((series, draw_history(series)))
    name_counts: dict[str, int] = {}
    for _, drawing in pairs:
        name_counts[drawing.name] = name_counts.get(drawing.name, 0) + 1
        drawing.name += f"-{name_counts[drawing.name]}" if name_counts[drawing.name] > 1 else ""
    return pairs


def draw_history(series: HistorySeries) -> Drawing:
    """A quantity over commits in order of time: ranges of the runs, levels, change points, degraded and failed runs."""
    quantity = series.quantity
    unit_size, unit = _choose_unit(series)
    title = f"{quantity.title[0].upper()}{quantity.title[1:]}: {series.name}"
    subtitle = f"{series.device}, {series.evidence}; from {series.points[0].date} to {series.points[-1].date}"
    width_in = style.FIGURE_WIDTH_IN
    legend_entries = _build_legend(series)
    height_in = (
        2.9 + compute_header_height_in(title, subtitle, width_in) + lanes.compute_legend_height_in(legend_entries)
    )
    figure = create_figure(width_in, height_in)
    draw_header(figure, title, subtitle)
    axes = figure.add_subplot()
    _draw_points(axes, series, unit_size)
    _draw_levels(axes, series, unit_size)
    values = [
        value / unit_size
        for point in series.points
        for value in (point.low, point.high, point.degraded_value)
        if value is not None
    ]
    low, high = min(values), max(values)
    axis_span = max(high - low, 0.04 * high)
    axes.set_ylim(
        low - 0.35 * axis_span, high + (0.3 + 0.12 * min(len(series.change_points), MAX_LABEL_LINES)) * axis_span
    )
    _draw_change_labels(axes, series)
    bottom = axes.get_ylim()[0]
    for index, point in enumerate(series.points):
        if point.status != "ok":
            axes.plot(
                index,
                bottom,
                "X",
                markersize=8,
                color=style.OOM_COLOUR,
                markeredgecolor="white",
                clip_on=False,
                zorder=5,
            )
    _label_commit_axis(axes, series)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylabel(f"{quantity.title} ({unit})")
    axes.grid(axis="y")
    lanes.draw_legend(figure, legend_entries)
    change_texts = [format_change_sentence(change) for change in series.change_points] or ["no change of level"]
    num_failed = sum(point.status != "ok" for point in series.points)
    alt_text = (
        f"{quantity.title} of {series.name} over {len(series.points)} commits or dates: {'; '.join(change_texts)}."
    )
    alt_text += (
        f" {format_plural(num_failed, 'point')} out of memory or failed, marked on the axis." if num_failed else ""
    )
    caption = f"{title}, over commits in order of time; {series.evidence}. Changes: {'; '.join(change_texts)}."
    name = build_slug("history", quantity.title, series.evidence, series.name)
    return Drawing(
        name,
        title,
        figure,
        caption,
        alt_text,
        notes=[format_change_sentence(change) for change in series.change_points],
    )


def _choose_unit(series: HistorySeries) -> tuple[float, str]:
    largest = max(
        (value for point in series.points for value in (point.high, point.degraded_value) if value is not None),
        default=1.0,
    )
    if series.quantity == STEP_TIME:
        return (1.0, "s") if largest >= 1 else (1e-3, "ms")
    if series.quantity == TFLOPS:
        return 1.0, "TFLOP/s"
    unit, unit_bytes = presentation.choose_memory_unit(largest)
    return float(unit_bytes), unit


def _draw_points(axes: Axes, series: HistorySeries, unit_size: float) -> None:
    line_style = style.EVIDENCE_STYLES[series.evidence].linestyle
    known_points = [(index, point) for index, point in enumerate(series.points) if point.value is not None]
    axes.plot(
        [i for i, _ in known_points],
        [(point.value or 0) / unit_size for _, point in known_points],
        color=style.GRID_COLOUR,
        linewidth=1.0,
        linestyle=line_style,
    )
    for index, point in known_points:
        if point.low is not None and point.high is not None and point.high > point.low:
            axes.plot(
                [index] * 2,
                [point.low / unit_size, point.high / unit_size],
                color=style.MUTED_COLOUR,
                linewidth=1.2,
                zorder=2,
            )
        axes.plot(index, (point.value or 0) / unit_size, "o", color=style.INK_COLOUR, markersize=4.5, zorder=3)
    for index, point in enumerate(series.points):
        if point.degraded_value is not None:
            axes.plot(
                index, point.degraded_value / unit_size, "v", markersize=7, markerfacecolor="white",
                markeredgecolor=style.INK_COLOUR, zorder=4,
            )  # fmt: skip


def _draw_levels(axes: Axes, series: HistorySeries, unit_size: float) -> None:
    """A line at every level, from one change to the next."""
    changes = [change for change in series.change_points if change.change is not None]
    edges = [0, *(change.index for change in changes), len(series.points)]
    for position, (start, end) in enumerate(pairwise(edges)):
        level = changes[position - 1].after if position else changes[0].before if changes else None
        if isinstance(level, float | int):
            axes.plot(
                [start - 0.4, end - 0.6], [level / unit_size] * 2, color="#0072b2", linewidth=2.0, alpha=0.6, zorder=1
            )


def _draw_change_labels(axes: Axes, series: HistorySeries) -> None:
    for position, change in enumerate(series.change_points):
        verdict_style = VERDICT_STYLES[change.verdict]
        axes.axvline(change.index - 0.5, color=verdict_style["color"], linewidth=1.2, linestyle="--", zorder=1)
        is_label_left = change.index > len(series.points) / 2
        label_position = change.index - 0.5, 0.99 - 0.075 * (position % MAX_LABEL_LINES)
        axes.annotate(
            _format_change_label(change), label_position, xycoords=("data", "axes fraction"),
            xytext=(-4 if is_label_left else 4, 0), textcoords="offset points",
            ha="right" if is_label_left else "left", va="top",
            fontsize=7.5, fontweight="bold", color=verdict_style["color"],
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85},
        )  # fmt: skip


def _format_change_label(change: ChangePoint) -> str:
    change_text = f"{change.before} → {change.after}" if change.change is None else format_percent(change.change)
    return f"{change.commit}: {change_text}" + (" (other machine)" if change.machines else "")


def format_change_sentence(change: ChangePoint) -> str:
    change_text = f"{change.before} to {change.after}" if change.change is None else format_percent(change.change)
    other_differences = [
        str(difference) for difference in (*change.machines, *change.software) if difference.name != "commit"
    ]
    differences_text = f"; also changed: {'; '.join(other_differences)}" if other_differences else ""
    return (
        f"{change.commit} of {change.date} (after {change.previous}): {change_text}, {change.verdict}{differences_text}"
    )


def _label_commit_axis(axes: Axes, series: HistorySeries) -> None:
    """Commits with their dates; with many points only some are named, those at which something changed always."""
    num_points = len(series.points)
    tick_interval = max(1, math.ceil(num_points / MAX_TICKS))
    candidate_indices = [
        *sorted({change.index for change in series.change_points}),
        *range(0, num_points, tick_interval),
    ]
    tick_indices: list[int] = []
    for index in candidate_indices:
        if all(abs(index - tick_index) >= max(1.0, num_points / 14) for tick_index in tick_indices):
            tick_indices.append(index)
    tick_points = [series.points[index] for index in sorted(tick_indices)]
    axes.set_xticks(
        sorted(tick_indices),
        [f"{point.commit}\n{point.date}" for point in tick_points],
        rotation=45,
        ha="right",
        fontsize=7,
    )
    axes.set_xlim(-0.7, num_points - 0.3)
    axes.set_xlabel("commit and date, in order of time")


def _build_legend(series: HistorySeries) -> list[tuple[Artist, str]]:
    legend_entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=style.INK_COLOUR, marker="o", markersize=4.5, linestyle=""), "mean of the runs")
    ]
    if any(point.low is not None and point.high is not None and point.high > point.low for point in series.points):
        legend_entries[0] = (
            Line2D([], [], color=style.MUTED_COLOUR, marker="o", markersize=4.5, markerfacecolor=style.INK_COLOUR),
            "runs: range and mean",
        )
    if any(change.change is not None for change in series.change_points):
        legend_entries.append((Line2D([], [], color="#0072b2", linewidth=2.0, alpha=0.6), "level"))
    for verdict in dict.fromkeys(change.verdict for change in series.change_points):
        legend_entries.append(
            (
                Line2D([], [], color=VERDICT_STYLES[verdict]["color"], linewidth=1.2, linestyle="--"),
                f"change: {verdict}",
            )
        )
    if any(point.degraded_value is not None for point in series.points):
        triangle_handle = Line2D(
            [], [], color=style.INK_COLOUR, marker="v", linestyle="", markerfacecolor="white", markersize=7
        )
        legend_entries.append((triangle_handle, "degraded: not representative"))
    if any(point.status != "ok" for point in series.points):
        cross_handle = Line2D(
            [], [], color=style.OOM_COLOUR, marker="X", linestyle="", markeredgecolor="white", markersize=8
        )
        failed_statuses = sorted({point.status for point in series.points} - {"ok"})
        legend_entries.append(
            (cross_handle, " or ".join("out of memory" if status == "oom" else status for status in failed_statuses))
        )
    return legend_entries
