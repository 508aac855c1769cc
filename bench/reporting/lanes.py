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

from bench.reporting import style
from bench.reporting.cells import by
from bench.reporting.drawing import header, header_height_in, new_figure

LANE_IN, HEADING_IN, GAP_IN = 0.21, 0.165, 0.1
HEADING_CHARS, LABEL_CHARS = 56, 26
AXIS_IN, FRAME_IN = 0.55, 1.6
"""Inches of the x axis with its label, and of all a figure may need besides its lanes."""
LEGEND_COLUMNS, LEGEND_CHARS = 2, 60
"""Columns of a legend, and characters that fit beside each other in all of them."""


@dataclass
class Lane:
    """One row of the table that a figure is drawn from, at its height in the axes (inches, downwards)."""

    row: Mapping[Any, Any]
    label: str
    y: float


@dataclass
class Group:
    """Lanes under one heading; `lines` are the heading's, wrapped."""

    lines: list[str]
    top: float
    lane_in: float = LANE_IN
    lanes: list[Lane] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        """Lower edge in inches."""
        return self.top + len(self.lines) * HEADING_IN + sum(self.lane_height(lane.label) for lane in self.lanes)

    def lane_height(self, label: str) -> float:
        """Inches a lane with this (wrapped) label takes."""
        return max(self.lane_in, LANE_IN + 0.13 * label.count("\n"))


@functools.cache
def wrap(label: str, chars: int) -> str:
    """`label` in lines of at most `chars` characters, broken at spaces and within names after ``_ - / =``."""
    lines = [""]
    for piece in re.split(r"(?<=[\s_/=-])", label):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > chars:
            lines.append("")
        lines[-1] += piece
    return "\n".join(part for line in lines for part in textwrap.wrap(line.strip(), chars, break_on_hyphens=False))


def wrap_parts(text: str, chars: int) -> list[str]:
    """Lines of at most `chars` characters, broken between the parts that " · " separates where that is possible."""
    lines: list[str] = []
    for part in text.split(" · "):
        if lines and len(lines[-1]) + 3 + len(part) <= chars:
            lines[-1] += f" · {part}"
        else:
            lines += wrap(part, chars).splitlines()
    return lines


def paginate(
    frame: pd.DataFrame,
    label: Callable[[Mapping[Any, Any]], str],
    *,
    lane_in: float = LANE_IN,
    max_height_in: float = style.MAX_HEIGHT_IN - FRAME_IN,
) -> Iterator[list[Group]]:
    """Lay out the rows of `frame` (columns ``heading``, whatever `label` needs) in pages of limited height.

    A group that does not fit the rest of a page starts the next one; one longer than a page is continued under its
    heading.
    """
    page: list[Group] = []
    headings: dict[str, list[Mapping[Any, Any]]] = {}
    for record in frame.to_dict("records"):
        headings.setdefault(str(record["heading"]), []).append(record)
    for heading, rows in headings.items():
        lines = wrap_parts(heading, HEADING_CHARS)
        pairs = [(each, wrap(label(each), LABEL_CHARS)) for each in rows]
        group = Group(lines, page[-1].bottom + GAP_IN if page else 0.0, lane_in)
        needed = sum(group.lane_height(text) for _, text in pairs)
        if page and group.bottom + needed > max_height_in:
            yield page
            page = []
            group.top = 0.0
        page.append(group)
        for row, text in pairs:
            if group.lanes and group.bottom + group.lane_height(text) > max_height_in:
                yield page
                group = Group([*lines[:-1], f"{lines[-1]} (continued)"], 0.0, lane_in)
                page = [group]
            group.lanes.append(Lane(row, text, group.bottom + group.lane_height(text) / 2))
    if page:
        yield page


def pages(frame: pd.DataFrame, label: Callable[[Mapping[Any, Any]], str]) -> Iterator[tuple[str, list[Group]]]:
    """Groups figure by figure, with what each shows in words: ``bf16, limit 0.5 GiB (1 of 2)``."""
    for (precision, limit), rows in by(frame, "precision", "limit"):
        layouts = list(paginate(rows, label))
        for number, groups in enumerate(layouts, 1):
            part = f" ({number} of {len(layouts)})" if len(layouts) > 1 else ""
            yield f"{precision}, {limit}".removesuffix(", ") + part, groups


def axes_for(
    groups: Sequence[Group],
    title: str,
    subtitle: str,
    key: Sequence[tuple[Artist, str]],
    *,
    width_in: float = style.WIDTH_IN,
    labels_in: float = AXIS_IN,
) -> tuple[Figure, Axes]:
    """A figure with title, headings, the lanes' labels and a legend; the caller draws into the lanes.

    `labels_in` is the height of the x axis' labels, so that lanes keep the height they were laid out with.
    """
    height = groups[-1].bottom
    figure = new_figure(width_in, height + labels_in + header_height_in(title, subtitle, width_in) + legend_in(key))
    header(figure, title, subtitle)
    axes = figure.add_subplot()
    axes.set_ylim(height + 0.04, -0.04)
    lanes = [lane for group in groups for lane in group.lanes]
    axes.set_yticks([lane.y for lane in lanes], [lane.label for lane in lanes])
    axes.tick_params(axis="y", length=0, pad=8)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    for group in groups:
        for position, line in enumerate(group.lines):
            text = axes.text(
                0.08 / width_in,
                group.top + (position + 0.55) * HEADING_IN,
                line,
                transform=blended_transform_factory(figure.transFigure, axes.transData),
                va="center",
                fontweight="bold",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                zorder=6,
            )
            text.set_in_layout(False)
    legend(figure, key)
    return figure, axes


def legend_in(key: Sequence[tuple[Artist, str]]) -> float:
    """Inches that `legend` takes."""
    lines = [name.count("\n") + 1 for name in _legend_names(key)]
    return 0.17 + 0.175 * max(map(sum, _in_columns(lines))) if key else 0.0


def legend(figure: Figure, key: Sequence[tuple[Artist, str]]) -> None:
    """A legend below the axes, if there is anything to explain."""
    if key:
        handles = [handle for handle, _ in key]
        figure.legend(handles, _legend_names(key), loc="outside lower center", ncols=LEGEND_COLUMNS)


def _legend_names(key: Sequence[tuple[Artist, str]]) -> list[str]:
    """In several lines where the columns would be wider than the figure."""
    names = [name for _, name in key]
    if sum(max(map(len, column), default=0) for column in _in_columns(names)) <= LEGEND_CHARS:
        return names
    return ["\n".join(wrap_parts(name, LEGEND_CHARS // LEGEND_COLUMNS)) for name in names]


def _in_columns(entries: Sequence[Any]) -> list[npt.NDArray[Any]]:
    """As matplotlib fills the columns of a legend."""
    return np.array_split(np.array(entries, dtype=object), LEGEND_COLUMNS)
