"""How much the steps of a run differ from each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.core.presentation import CPU_NOTE, build_slug, format_list, format_number, format_plural, format_seconds
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import Drawing, ReportFigure, ReportSection
from bench.reporting.tables.cells import iterate_groups, sort_rows
from bench.reporting.tables.table import RowNeeds

HOW_TO_READ = (
    "One lane is one run, one dot one timed step: how much longer or shorter it took than the run's median, which is "
    "printed at the right. A step takes as long as its slowest rank. The box holds the middle half of the steps. A "
    "narrow lane is a steady run; dots far to the right are stragglers (another job, the allocator flushing, the "
    "network). A narrow lane does not make a comparison certain: steps of one run agree with each other more than "
    "with the next run, so compare strategies over repeated runs."
)
FIGURE = ReportFigure(
    name="spread",
    page_position=100,
    title="Step-time spread",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(allowed_values={"status": ("ok",)}, present=("steps",)),
    empty_message="No run in this store kept the times of its steps.",
)
LEGEND_ENTRIES: list[tuple[Artist, str]] = [
    (Line2D([], [], color=style.MUTED_COLOUR, marker="o", linestyle="", markersize=3.5), "a step"),
    (Patch(color="#c9c9c9"), "middle half of the steps"),
]
MAX_SHOWN_DEVIATION_PERCENT = 60.0
"""Steps further from the median than this stand at the edge with their value, so that one does not hide the rest."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per run that kept its step times.

    Returns
    -------
    DataFrame
        The table's columns and ``median_s``, ``deviations`` (percent from the median, one per step), ``low`` and
        ``high`` (their quartiles) and ``repeats`` (how many runs of the same configuration there are).
    """
    completed_runs = table[(table["status"] == "ok") & (table["steps"].map(len) > 0)]
    if completed_runs.empty:
        return completed_runs.assign(median_s=[], deviations=[])
    medians = [float(np.median(step_times)) for step_times in completed_runs["steps"]]
    deviations = [
        100 * (step_times / median - 1) for step_times, median in zip(completed_runs["steps"], medians, strict=True)
    ]
    repeat_groups = completed_runs.groupby(
        [completed_runs[name] for name in ("place", "evidence", "precision", "heading", "variant")], dropna=False
    )
    return sort_rows(
        completed_runs.assign(
            median_s=medians,
            deviations=deviations,
            low=[np.percentile(run_deviations, 25) for run_deviations in deviations],
            high=[np.percentile(run_deviations, 75) for run_deviations in deviations],
            repeats=repeat_groups["run_id"].transform("size"),
        )
    )


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """Figures per place, precision and memory limit."""
    runs = select(table)
    if runs.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    oom_runs = table[(table["status"] == "oom") & table["evidence"].isin(["measured", "rehearsed"])]
    if len(oom_runs):
        oom_counts_text = format_list(
            [f"{name} × {count}" for name, count in oom_runs["variant"].value_counts(sort=False).items()]
        )
        section.notice = (
            f"Out of memory, so without timed steps: {format_plural(len(oom_runs), 'run')} ({oom_counts_text})."
        )
    for (place,), place_runs in iterate_groups(runs, "place"):
        all_deviations = np.concatenate(list(place_runs["deviations"]))
        x_limits = (
            max(all_deviations.min() * 1.1 - 1, -MAX_SHOWN_DEVIATION_PERCENT),
            min(all_deviations.max() * 1.1 + 1, MAX_SHOWN_DEVIATION_PERCENT),
        )
        for subject, groups in lanes.paginate_by_precision(place_runs, _format_label):
            section.plan_figure(_draw_spread, groups, str(place), subject, x_limits, palette)
    return section


def _format_label(row: Mapping[Any, Any] | pd.Series) -> str:
    is_numbered = row["repeats"] > 1 and not pd.isna(row["repeat"])
    return lanes.format_lane_label(row) + (f" #{row['repeat']}" if is_numbered else "")


def _draw_spread(
    groups: list[lanes.LaneGroup],
    place: str,
    subject: str,
    x_limits: tuple[float, float],
    palette: dict[str, style.VariantStyle],
) -> Drawing:
    shown_runs = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    cpu_note = CPU_NOTE if shown_runs["device"].iloc[0] == "cpu" else ""
    title = f"Step times around their median, {subject}"
    figure, axes = lanes.build_lane_axes(groups, title, f"{place}\n{cpu_note}", _build_legend(shown_runs))
    for group in groups:
        for lane in group.lanes:
            _draw_lane(axes, lane, palette[lane.row["variant"]].colour, x_limits)
    low, high = x_limits
    axes.set_xlim(low, high + 0.25 * (high - low))
    axes.axvline(0, color=style.MUTED_COLOUR, linewidth=0.8, zorder=1)
    axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= high])
    axes.xaxis.set_major_formatter(lambda value, _: "0" if value == 0 else f"{value:+g}")
    axes.set_xlabel("step time against the run's median (%)", loc="left")
    widest_run = shown_runs.iloc[int(np.argmax(shown_runs["high"] - shown_runs["low"]))]
    alt_text = (
        f"Dots and boxes of the step times of {len(shown_runs)} runs in {subject} on {place}, in percent of each run's "
        f"median. Widest middle half: {lanes.format_lane_label(widest_run)}, {widest_run['heading']}, "
        f"{widest_run['low']:+.1f} to "
        f"{widest_run['high']:+.1f} percent."
    )
    caption = f"Step times of {len(shown_runs)} runs in {subject} on {place}. " + (f"{cpu_note}." if cpu_note else "")
    return Drawing(build_slug("spread", subject, place), title, figure, caption.strip(), alt_text)


def _build_legend(shown_runs: pd.DataFrame) -> list[tuple[Artist, str]]:
    has_degraded = any(lanes.is_degraded(row) for row in shown_runs.to_dict("records"))
    return [*LEGEND_ENTRIES, lanes.DEGRADED_LEGEND_ENTRY] if has_degraded else LEGEND_ENTRIES


def _draw_lane(axes: Axes, lane: lanes.Lane, colour: str, x_limits: tuple[float, float]) -> None:
    row, deviations = lane.row, lane.row["deviations"]
    box_style = {**style.build_bar_style(colour, row["evidence"]), "alpha": 0.45}
    axes.barh(lane.y, row["high"] - row["low"], lanes.BAR_HEIGHT_IN, left=row["low"], zorder=2, **box_style)
    shown_deviations = deviations[(deviations >= x_limits[0]) & (deviations <= x_limits[1])]
    jittered_y = lane.y + 0.035 * np.sin(
        2.4 * np.arange(len(shown_deviations))
    )  # golden angle: even, and the same every time
    axes.plot(
        shown_deviations, jittered_y, "o", markersize=2.4, color=colour, markeredgewidth=0, zorder=3, rasterized=True
    )
    note_text = format_seconds(row["median_s"])
    if lanes.is_degraded(row):
        lanes.draw_degraded_marker(axes, lane, row["high"])
        note_text += " degraded"
    deviations_beyond = deviations[deviations > x_limits[1]]
    if len(deviations_beyond):
        axes.plot(x_limits[1], lane.y, ">", markersize=6, color=colour, zorder=4)
        note_text += (
            f", {len(deviations_beyond)} step{'s' * (len(deviations_beyond) != 1)} to "
            f"{format_number(float(deviations_beyond.max()), 2)} %"
        )
    axes.annotate(
        note_text, (x_limits[1], lane.y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=7.5, zorder=5
    )
