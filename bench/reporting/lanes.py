"""The layout most figures share: one horizontal lane per run, in groups with a heading, continued on a next figure.

Labels stand beside their lane instead of in a legend, so any number of variants with names of any length stays
readable on a phone and without colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.reporting import style
from bench.reporting.drawing import header, new_figure

LANE_IN, HEADING_IN, GAP_IN = 0.21, 0.165, 0.1
HEADING_CHARS, LABEL_CHARS = 56, 30
FRAME_IN = 1.35
"""Inches a figure needs besides its lanes: title, axis and legend."""


@dataclass
class Lane:
    """One row of the table that a figure is drawn from, at its height in the axes (inches, downwards)."""

    row: pd.Series
    label: str
    y: float


@dataclass
class Group:
    """Lanes under one heading; `lines` are the heading's, wrapped."""

    lines: list[str]
    top: float
    lanes: list[Lane] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        """Lower edge in inches."""
        return self.top + len(self.lines) * HEADING_IN + sum(lane_height(lane.label) for lane in self.lanes)


def wrap(label: str, chars: int) -> str:
    """`label` in lines of at most `chars` characters."""
    return "\n".join(textwrap.wrap(label, chars, break_on_hyphens=False) or [""])


def lane_height(label: str) -> float:
    """Inches a lane with this (wrapped) label takes."""
    return LANE_IN + 0.13 * label.count("\n")


def paginate(
    frame: pd.DataFrame, label: Callable[[pd.Series], str], max_height_in: float = style.MAX_HEIGHT_IN - FRAME_IN
) -> Iterator[list[Group]]:
    """Lay out the rows of `frame` (columns ``heading``, whatever `label` needs) in pages of limited height.

    A group that does not fit the rest of a page starts the next one; one longer than a page is continued under its
    heading.
    """
    page: list[Group] = []
    for heading, rows in frame.groupby("heading", sort=False):
        lines = textwrap.wrap(str(heading), HEADING_CHARS) or [""]
        pairs = [(row, wrap(label(row), LABEL_CHARS)) for _, row in rows.iterrows()]
        needed = len(lines) * HEADING_IN + sum(lane_height(text) for _, text in pairs)
        if page and page[-1].bottom + GAP_IN + needed > max_height_in:
            yield page
            page = []
        group = Group(lines, page[-1].bottom + GAP_IN if page else 0.0)
        page.append(group)
        for row, text in pairs:
            if group.lanes and group.bottom + lane_height(text) > max_height_in:
                yield page
                group = Group([*lines[:-1], f"{lines[-1]} (continued)"], 0.0)
                page = [group]
            group.lanes.append(Lane(row, text, group.bottom + lane_height(text) / 2))
    if page:
        yield page


def axes_for(
    groups: Sequence[Group], title: str, subtitle: str, width_in: float = style.WIDTH_IN
) -> tuple[Figure, Axes]:
    """A figure with the lanes' labels and headings in place; the caller draws into the lanes and labels the x axis."""
    height = groups[-1].bottom
    figure = new_figure(width_in, height + FRAME_IN)
    axes = figure.add_subplot()
    axes.set_ylim(height + 0.04, -0.04)
    lanes = [lane for group in groups for lane in group.lanes]
    axes.set_yticks([lane.y for lane in lanes], [lane.label for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    for group in groups:
        for position, line in enumerate(group.lines):
            text = axes.text(
                0.0,
                group.top + (position + 0.55) * HEADING_IN,
                line,
                transform=axes.get_yaxis_transform(),
                va="center",
                fontweight="bold",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                zorder=6,
            )
            text.set_in_layout(False)
    header(figure, title, subtitle)
    return figure, axes


def legend(figure: Figure, handles: Sequence[tuple[Artist, str]], columns: int = 3) -> None:
    """A legend below the axes, if there is anything to explain."""
    if handles:
        figure.legend(
            [handle for handle, _ in handles], [name for _, name in handles], loc="outside lower center", ncols=columns
        )
