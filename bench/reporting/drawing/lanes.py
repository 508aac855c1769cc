"""The layout most figures share: one horizontal lane per run, in groups with a heading, continued on a next figure.

Labels stand beside their lane instead of in a legend, so any number of variants with names of any length stays
readable on a phone and without colour.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

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
