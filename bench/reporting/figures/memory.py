"""Peak memory per rank by strategy: allocated, active and reserved."""

from __future__ import annotations

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.core.presentation import build_slug, choose_memory_unit, format_number, get_rank_noun
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import Drawing, ReportFigure, ReportSection
from bench.reporting.tables.cells import build_cells, iterate_groups, select_drawable_cells
from bench.reporting.tables.table import COMPLETED_STATUSES, RowNeeds

HOW_TO_READ = (
    "Shorter fits on a smaller device. The solid bar is the peak of allocated tensor memory in a training step after "
    "warm-up, of the rank that needed most: parameters, gradients, optimizer state, activations and, under FSDP, the "
    "blocks that are gathered at that moment. The tick is the peak of active memory (freed, but still in use by a "
    "stream); the hatched end is what the caching allocator held on top (reserved), which is what must fit on the "
    "device. A CPU does not cache, so there all three are one. Sharding divides parameters, gradients and optimizer "
    "state by the factor F, never the activations."
)
FIGURE = ReportFigure(
    name="memory",
    page_position=30,
    title="Memory",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(allowed_values={"status": COMPLETED_STATUSES}),
    empty_message="No run in this store has a memory peak.",
)

RESERVED_HATCH = "\\\\\\\\\\"
"""Lines, not dots: of these every one would be a circle in the file, megabytes of them."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per configuration: peak allocated bytes (``median``, ``low``, ``high``, ``points``), the medians
    ``peak_active_bytes`` and ``peak_reserved_bytes``, ``memory_limit_bytes`` (NaN for none), or out of memory.
    """
    drawable_cells = select_drawable_cells(
        build_cells(table, "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")
    )
    bytes_by_limit = {
        limit: limit_bytes
        for limit, limit_bytes in zip(table["limit"], table["memory_limit_bytes"], strict=True)
        if limit
    }
    return drawable_cells.assign(
        memory_limit_bytes=[float(bytes_by_limit.get(limit, float("nan"))) for limit in drawable_cells["limit"]]
    )


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """Figures per place, precision and memory limit."""
    section = FIGURE.create_section()
    all_cells = select(table)
    if all_cells["median"].notna().sum() == 0:
        section.notice = FIGURE.empty_message
    for (place,), place_cells in iterate_groups(all_cells, "place"):
        for _, limit_cells in iterate_groups(place_cells, "limit"):
            largest_value = limit_cells[["high", "peak_reserved_bytes", "memory_limit_bytes"]].max().max()
            largest_bytes = 0.0 if pd.isna(largest_value) else float(largest_value)
            for subject, groups in lanes.paginate_by_precision(limit_cells, lanes.format_lane_label):
                section.plan_figure(_draw_memory, groups, str(place), subject, largest_bytes, palette)
    return section


def _draw_memory(
    groups: list[lanes.LaneGroup],
    place: str,
    subject: str,
    largest_bytes: float,
    palette: dict[str, style.VariantStyle],
) -> Drawing:
    shown_cells = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    device = shown_cells["device"].iloc[0]
    noun = get_rank_noun(device)
    unit, unit_bytes = choose_memory_unit(largest_bytes)
    title = f"Peak memory per {noun}, {subject}"
    figure, axes = lanes.build_lane_axes(
        groups, title, place, lanes.build_legend_entries(shown_cells, _build_legend(shown_cells))
    )
    axes.set_xlim(0, largest_bytes / unit_bytes * 1.25 or 1.0)
    for group in groups:
        for lane in group.lanes:
            _draw_lane(axes, lane, palette[lane.row["variant"]], unit_bytes)
        limit_bytes = group.lanes[0].row["memory_limit_bytes"]
        if not pd.isna(limit_bytes):
            top = group.top + len(group.heading_lines) * lanes.HEADING_HEIGHT_IN
            axes.plot(
                [limit_bytes / unit_bytes] * 2,
                [top, group.bottom],
                color=style.LIMIT_COLOUR,
                linestyle="--",
                linewidth=1.5,
            )
    axes.set_xlabel(f"peak memory per {noun} ({unit})")
    alt_text = (
        f"Bar chart of peak allocated and reserved memory per {noun} for {len(shown_cells)} configurations in "
        f"{subject} on "
        f"{place}. Out of memory: {int((shown_cells['out_of_memory'] > 0).sum())}."
    )
    caption = f"Peak memory per {noun} in {subject} on {place}."
    return Drawing(build_slug("memory", subject, place), title, figure, caption, alt_text)


def _draw_lane(axes: Axes, lane: lanes.Lane, mark: style.VariantStyle, unit_bytes: int) -> None:
    row = lane.row
    if pd.isna(row["median"]):
        lanes.draw_oom_lane(axes, lane, show_requested=True)
        return
    allocated, reserved = row["median"] / unit_bytes, row["peak_reserved_bytes"] / unit_bytes
    bar_end, note_text = row["high"] / unit_bytes, format_number(allocated)
    if reserved > allocated * 1.001:
        reserved_style = {
            **style.build_bar_style(mark.colour, "rehearsed"),
            "facecolor": "white",
            "hatch": RESERVED_HATCH,
            "linewidth": 0.8,
        }
        axes.barh(lane.y, reserved - allocated, lanes.BAR_HEIGHT_IN, left=allocated, zorder=2, **reserved_style)
        bar_end, note_text = max(bar_end, reserved), f"{note_text}, {format_number(reserved)} reserved"
    lanes.draw_bar(axes, lane, allocated, mark)
    active = row["peak_active_bytes"] / unit_bytes
    if active > allocated * 1.001:
        axes.plot(
            [active] * 2,
            [lane.y - lanes.BAR_HEIGHT_IN * 0.75, lane.y + lanes.BAR_HEIGHT_IN * 0.75],
            color=style.INK_COLOUR,
            zorder=3,
        )
    lanes.draw_repeats(axes, lane, unit_bytes)
    note_text += lanes.format_partial_oom(row)
    if row["degraded"]:
        lanes.draw_degraded_marker(axes, lane, bar_end)
        note_text = f" {note_text} degraded"
    lanes.draw_note(axes, lane, bar_end, note_text)


def _build_legend(shown_cells: pd.DataFrame) -> list[tuple[Artist, str]]:
    legend_entries: list[tuple[Artist, str]] = []
    if (shown_cells["peak_reserved_bytes"] > shown_cells["median"] * 1.001).any():
        reserved_patch = Patch(facecolor="white", edgecolor=style.MUTED_COLOUR, hatch=RESERVED_HATCH)
        legend_entries += [(Patch(color=style.MUTED_COLOUR), "allocated"), (reserved_patch, "reserved on top")]
    if (shown_cells["peak_active_bytes"] > shown_cells["median"] * 1.001).any():
        legend_entries.append(
            (Line2D([], [], color=style.INK_COLOUR, marker="|", linestyle="", markersize=9), "active")
        )
    if shown_cells["memory_limit_bytes"].notna().any():
        legend_entries.append((Line2D([], [], color=style.LIMIT_COLOUR, linestyle="--"), "memory limit"))
    return legend_entries
