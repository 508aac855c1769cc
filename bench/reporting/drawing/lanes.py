"""The layout most figures share: one horizontal lane per run, in groups with a heading, continued on a next figure.

Labels stand beside their lane instead of in a legend, so any number of variants with names of any length stays
readable on a phone and without colour.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from bench.core import presentation
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import compute_header_height_in, create_figure, draw_header
from bench.reporting.tables.cells import iterate_groups

LANE_HEIGHT_IN, HEADING_HEIGHT_IN, GROUP_GAP_IN = 0.21, 0.165, 0.1
MAX_HEADING_CHARS, MAX_LABEL_CHARS = 56, 26
AXIS_HEIGHT_IN, MAX_FRAME_HEIGHT_IN = 0.55, 1.6
"""Inches of the x axis with its label, and of all a figure may need besides its lanes."""
LEGEND_COLUMNS, MAX_LEGEND_CHARS = 2, 60
"""Columns of a legend, and characters that fit beside each other in all of them."""


@dataclass
class Lane:
    """One row of the table that a figure is drawn from, at its height in the axes (inches, downwards)."""

    row: Mapping[Any, Any]
    label: str
    y: float


@dataclass
class LaneGroup:
    """Lanes under one heading; `heading_lines` are the heading's, wrapped."""

    heading_lines: list[str]
    top: float
    min_lane_height_in: float = LANE_HEIGHT_IN
    lanes: list[Lane] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        """Lower edge in inches."""
        return (
            self.top
            + len(self.heading_lines) * HEADING_HEIGHT_IN
            + sum(self.compute_lane_height(lane.label) for lane in self.lanes)
        )

    def compute_lane_height(self, label: str) -> float:
        """Inches a lane with this (wrapped) label takes."""
        return max(self.min_lane_height_in, LANE_HEIGHT_IN + 0.13 * label.count("\n"))


@functools.cache
def wrap_label(label: str, max_chars: int) -> str:
    """`label` in lines of at most `max_chars` characters, broken at spaces and within names after ``_ - / =``."""
    lines = [""]
    for word in re.split(r"(?<=[\s_/=-])", label):
        if lines[-1] and len(lines[-1] + word.rstrip()) > max_chars:
            lines.append("")
        lines[-1] += word
    return "\n".join(part for line in lines for part in textwrap.wrap(line.strip(), max_chars, break_on_hyphens=False))


def wrap_parts(text: str, max_chars: int) -> list[str]:
    """Lines of at most `max_chars` characters, broken between the parts that " · " separates where that is possible."""
    lines: list[str] = []
    for part in text.split(" · "):
        if lines and len(lines[-1]) + 3 + len(part) <= max_chars:
            lines[-1] += f" · {part}"
        else:
            lines += wrap_label(part, max_chars).splitlines()
    return lines


def paginate_lanes(
    frame: pd.DataFrame,
    format_label: Callable[[Mapping[Any, Any]], str],
    *,
    min_lane_height_in: float = LANE_HEIGHT_IN,
    max_height_in: float = style.MAX_FIGURE_HEIGHT_IN - MAX_FRAME_HEIGHT_IN,
) -> Iterator[list[LaneGroup]]:
    """Lay out the rows of `frame` (columns ``heading``, whatever `format_label` needs) in pages of limited height.

    A group that does not fit the rest of a page starts the next one; one longer than a page is continued under its
    heading.
    """
    page: list[LaneGroup] = []
    headings: dict[str, list[Mapping[Any, Any]]] = {}
    for record in frame.to_dict("records"):
        headings.setdefault(str(record["heading"]), []).append(record)
    for heading, rows in headings.items():
        heading_lines = wrap_parts(heading, MAX_HEADING_CHARS)
        labelled_rows = [(row, wrap_label(format_label(row), MAX_LABEL_CHARS)) for row in rows]
        group = LaneGroup(heading_lines, page[-1].bottom + GROUP_GAP_IN if page else 0.0, min_lane_height_in)
        needed_height_in = sum(group.compute_lane_height(label_text) for _, label_text in labelled_rows)
        if page and group.bottom + needed_height_in > max_height_in:
            yield page
            page = []
            group.top = 0.0
        page.append(group)
        for row, label_text in labelled_rows:
            if group.lanes and group.bottom + group.compute_lane_height(label_text) > max_height_in:
                yield page
                group = LaneGroup([*heading_lines[:-1], f"{heading_lines[-1]} (continued)"], 0.0, min_lane_height_in)
                page = [group]
            group.lanes.append(Lane(row, label_text, group.bottom + group.compute_lane_height(label_text) / 2))
    if page:
        yield page


def paginate_by_precision(
    frame: pd.DataFrame, format_label: Callable[[Mapping[Any, Any]], str]
) -> Iterator[tuple[str, list[LaneGroup]]]:
    """Groups figure by figure, with what each shows in words: ``bf16, limit 0.5 GiB (1 of 2)``."""
    for (precision, limit), rows in iterate_groups(frame, "precision", "limit"):
        page_layouts = list(paginate_lanes(rows, format_label))
        for page_number, groups in enumerate(page_layouts, 1):
            part_note = f" ({page_number} of {len(page_layouts)})" if len(page_layouts) > 1 else ""
            yield f"{precision}, {limit}".removesuffix(", ") + part_note, groups


def build_lane_axes(
    groups: Sequence[LaneGroup],
    title: str,
    subtitle: str,
    legend_entries: Sequence[tuple[Artist, str]],
    *,
    width_in: float = style.FIGURE_WIDTH_IN,
    axis_height_in: float = AXIS_HEIGHT_IN,
) -> tuple[Figure, Axes]:
    """A figure with title, headings, the lanes' labels and a legend; the caller draws into the lanes.

    `axis_height_in` is the height of the x axis' labels, so that lanes keep the height they were laid out with.
    """
    lanes_height_in = groups[-1].bottom
    figure = create_figure(
        width_in,
        lanes_height_in
        + axis_height_in
        + compute_header_height_in(title, subtitle, width_in)
        + compute_legend_height_in(legend_entries),
    )
    draw_header(figure, title, subtitle)
    axes = figure.add_subplot()
    axes.set_ylim(lanes_height_in + 0.04, -0.04)
    lanes = [lane for group in groups for lane in group.lanes]
    axes.set_yticks([lane.y for lane in lanes], [lane.label for lane in lanes])
    axes.tick_params(axis="y", length=0, pad=8)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    for group in groups:
        for position, line in enumerate(group.heading_lines):
            text = axes.text(
                0.08 / width_in,
                group.top + (position + 0.55) * HEADING_HEIGHT_IN,
                line,
                transform=blended_transform_factory(figure.transFigure, axes.transData),
                va="center",
                fontweight="bold",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                zorder=6,
            )
            text.set_in_layout(False)
    draw_legend(figure, legend_entries)
    return figure, axes


def compute_legend_height_in(legend_entries: Sequence[tuple[Artist, str]]) -> float:
    """Inches that `draw_legend` takes."""
    line_counts = [name.count("\n") + 1 for name in _wrap_legend_names(legend_entries)]
    return 0.17 + 0.175 * max(map(sum, _split_into_columns(line_counts))) if legend_entries else 0.0


def draw_legend(figure: Figure, legend_entries: Sequence[tuple[Artist, str]]) -> None:
    """A legend below the axes, if there is anything to explain."""
    if legend_entries:
        handles = [handle for handle, _ in legend_entries]
        figure.legend(handles, _wrap_legend_names(legend_entries), loc="outside lower center", ncols=LEGEND_COLUMNS)


def _wrap_legend_names(legend_entries: Sequence[tuple[Artist, str]]) -> list[str]:
    """In several lines where the columns would be wider than the figure."""
    names = [name for _, name in legend_entries]
    if sum(max(map(len, column), default=0) for column in _split_into_columns(names)) <= MAX_LEGEND_CHARS:
        return names
    return ["\n".join(wrap_parts(name, MAX_LEGEND_CHARS // LEGEND_COLUMNS)) for name in names]


def _split_into_columns(entries: Sequence[Any]) -> list[npt.NDArray[Any]]:
    """As matplotlib fills the columns of a legend."""
    return np.array_split(np.array(entries, dtype=object), LEGEND_COLUMNS)


# --- The marks that lane figures share: bars with their repeats, runs out of memory, and the legend that names them.

MAX_SHORT_NOTE_CHARS = 20
"""Characters that fit behind every bar."""

LONG_BAR = 0.55
"""Share of the axis from which on no longer note fits behind a bar."""

BAR_HEIGHT_IN = 0.13
DEGRADED_LEGEND_ENTRY: tuple[Artist, str] = (
    Line2D([], [], color=style.INK_COLOUR, marker="<", linestyle="", markerfacecolor="white", markersize=7),
    "degraded: time not representative",
)
"""The legend's entry for runs whose time does not represent the speed."""


def format_lane_label(row: Mapping[Any, Any] | pd.Series) -> str:
    """A lane's label: the variant, and what kind of evidence it is unless it was measured."""
    return str(row["variant"]) if row["evidence"] == "measured" else f"{row['variant']} ({row['evidence']})"


def draw_bar(axes: Axes, lane: Lane, value: float, variant_style: style.VariantStyle, *, left: float = 0.0) -> None:
    """The bar of one lane, filled as its kind of evidence asks."""
    axes.barh(
        lane.y,
        value - left,
        BAR_HEIGHT_IN,
        left=left,
        zorder=2,
        **style.build_bar_style(variant_style.colour, lane.row["evidence"]),
    )


def draw_repeats(axes: Axes, lane: Lane, unit_size: float = 1.0) -> None:
    """Points of the repeats and a whisker from the lowest to the highest, where there is more than one."""
    points = [point / unit_size for point in lane.row["points"]]
    if len(points) > 1:
        axes.plot([points[0], points[-1]], [lane.y] * 2, color=style.INK_COLOUR, linewidth=1.2, zorder=3)
        axes.plot(points, [lane.y] * len(points), "|", color=style.INK_COLOUR, markersize=7, zorder=3)


def draw_note(axes: Axes, lane: Lane, x: float, text: str) -> None:
    """Words beside the end of a lane's bar: before it where nothing would fit behind it, within the limits of x."""
    is_before_end = x > LONG_BAR * axes.get_xlim()[1] and len(text) > MAX_SHORT_NOTE_CHARS
    axes.annotate(
        text, (x, lane.y), xytext=(-5 if is_before_end else 5, 0), textcoords="offset points", va="center",
        ha="right" if is_before_end else "left", fontsize=7.5, zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
    )  # fmt: skip


def is_degraded(row: Mapping[Any, Any] | pd.Series) -> bool:
    """Whether a row (or cell) ran, and its time does not represent the speed."""
    return bool(pd.notna(row["degraded"]) and row["degraded"])


def draw_degraded_marker(axes: Axes, lane: Lane, x: float) -> None:
    """A hollow triangle at the end of the bar: the time is not representative."""
    axes.plot(x, lane.y, "<", markersize=7, markerfacecolor="white", markeredgecolor=style.INK_COLOUR, zorder=4)


def draw_oom_cross(axes: Axes, x: float, y: float, colour: str, evidence: str) -> None:
    """A run out of memory, on the axis: filled if it was measured, hollow or half filled if it was not."""
    marker_options = style.build_marker_style(colour, evidence)
    edge_options = {"markeredgecolor": style.INK_COLOUR} if evidence == "measured" else {"markeredgewidth": 1.4}
    axes.plot(x, y, "X", markersize=9, clip_on=False, zorder=5, **{**marker_options, **edge_options})


def draw_oom_lane(axes: Axes, lane: Lane, show_requested: bool = False) -> None:
    """A cross on the axis and where memory ran out, in words."""
    row = lane.row
    marker_options = style.build_marker_style(style.OOM_COLOUR, row["evidence"])
    edge_options = {"markeredgecolor": "white"} if row["evidence"] == "measured" else {"markeredgewidth": 1.2}
    axes.plot(0, lane.y, "X", markersize=8, clip_on=False, zorder=5, **{**marker_options, **edge_options})
    text = format_oom_phase(row)
    if show_requested and pd.notna(row["oom_bytes"]):
        text += f", asked for {presentation.format_memory(row['oom_bytes'])}"
    annotation = axes.annotate(
        text, (0, lane.y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=7.5,
        color=style.OOM_COLOUR, fontweight="bold", zorder=5,
    )  # fmt: skip
    annotation.set_in_layout(False)


def format_oom_phase(row: Mapping[Any, Any] | pd.Series) -> str:
    """``OOM in forward``."""
    return f"OOM in {row['oom_phase']}" if pd.notna(row["oom_phase"]) else "OOM"


def format_partial_oom(row: Mapping[Any, Any] | pd.Series) -> str:
    """What to say beside a value when some repeats ran out of memory: ``(1 of 3 repeats OOM)``; else nothing."""
    repeat_count = row["fitted"] + row["out_of_memory"]
    return f" ({row['out_of_memory']} of {repeat_count} repeats OOM)" if row["out_of_memory"] else ""


def build_legend_entries(
    cells: pd.DataFrame, extra_entries: Iterable[tuple[Artist, str]] = ()
) -> list[tuple[Artist, str]]:
    """Legend entries for what occurs in `cells`, and only that."""
    entries: list[tuple[Artist, str]] = []
    kinds = style.sort_evidence(cells["evidence"])
    if list(kinds) != ["measured"]:
        entries += [(Patch(**style.build_bar_style(style.MUTED_COLOUR, kind)), kind) for kind in kinds]
    entries += extra_entries
    if any(len(points) > 1 for points in cells["points"]):
        entries.append((Line2D([], [], color=style.INK_COLOUR, marker="|", linewidth=1.2), "repeats: range and median"))
    if (cells["out_of_memory"] > 0).any():
        cross_marker = Line2D(
            [], [], color=style.OOM_COLOUR, marker="X", linestyle="", markeredgecolor="white", markersize=8
        )
        entries.append((cross_marker, "out of memory"))
    if any(is_degraded(row) for row in cells.to_dict("records")):
        entries.append(DEGRADED_LEGEND_ENTRY)
    return entries
