"""One finished figure with the words that go with it, and how it becomes a file."""

from __future__ import annotations

import functools
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from bench.reporting.drawing import style
from bench.reporting.tables.table import RowNeeds

LINE_HEIGHT_IN_PER_POINT = 1.3 / 72
"""Inches of a line of text per point of its size."""


@dataclass
class Drawing:
    """A figure, its caption and its description for those who cannot see it."""

    name: str
    """File name without ending."""
    title: str
    figure: Figure
    caption: str
    alt: str
    wide: bool = False
    """Wider than a phone: the page lets it scroll in its own box."""
    notes: list[str] = field(default_factory=list)
    """Sentences about single marks, listed under the caption."""


@dataclass
class FigureTable:
    """What figures show as a plain table."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    numeric_columns: frozenset[str] = frozenset()
    """Columns that are aligned to the right."""


@dataclass
class ReportSection:
    """What one figure module contributes to the page.

    Figures are planned first and drawn when they are asked for: one takes half a second and megabytes, and a large
    store has thousands.
    """

    name: str
    title: str
    how_to_read: str
    tables: list[FigureTable] = field(default_factory=list)
    notice: str = ""
    """Why there is nothing to draw, or what was left out; empty if there is nothing to say."""
    planned_figures: list[Callable[[], Drawing | None]] = field(default_factory=list)
    _drawings: list[Drawing] | None = None

    def plan_figure(self, draw: Callable[..., Drawing | None], *arguments: Any) -> None:
        """Have a figure drawn later by a function, which may find that there is none to draw."""
        self.planned_figures.append(functools.partial(draw, *arguments))

    def draw_figures(self, max_figures: int | None = None) -> Iterator[Drawing]:
        """Draw the planned figures, or the first `max_figures` of them; they are `drawings` from then on."""
        self._drawings = []
        for draw_figure in self.planned_figures[:max_figures]:
            with style.apply_report_style():
                drawing = draw_figure()
            if drawing is not None:
                self._drawings.append(drawing)
                yield drawing

    @property
    def drawings(self) -> list[Drawing]:
        """The figures; all that are planned, unless `draw_figures` drew fewer."""
        return list(self.draw_figures()) if self._drawings is None else self._drawings


NO_NEEDS = RowNeeds()


@dataclass(frozen=True)
class ReportFigure:
    """What a figure module states of its section of the page. Its figures are built where its needs are met."""

    name: str
    page_position: int
    """Where on the page: sections are in ascending order."""
    title: str
    how_to_read: str
    needs: RowNeeds = NO_NEEDS
    empty_message: str = ""
    """Why there is nothing to draw; empty: the page then has no such section. The name of a column in braces becomes
    `` (all have 8)`` where all rows have one value in it, and nothing elsewhere."""
    shows_all_trials: bool = False
    """Whether it is given all that a search for the largest batch tried; else its end."""

    def create_section(self) -> ReportSection:
        """The section, with nothing in it yet."""
        return ReportSection(self.name, self.title, self.how_to_read)

    def create_empty_section(self, table: pd.DataFrame) -> ReportSection:
        """The section of a table that gives nothing to draw."""
        section = self.create_section()
        section.notice = re.sub(r"{(\w+)}", lambda match: _format_shared_value(table[match[1]]), self.empty_message)
        return section


def _format_shared_value(column: pd.Series) -> str:
    values = column.dropna().unique()
    return f" (all have {values[0]})" if len(values) == 1 else ""


def create_figure(width_in: float, height_in: float) -> Figure:
    """A figure outside pyplot's global state, laid out so that labels never overlap the axes."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)  # type: ignore[union-attr, call-arg]
    return figure


def draw_header(figure: Figure, title: str, subtitle: str) -> None:
    """Title at the left edge and, below it in small type, where the rows come from."""
    width_in, height_in = figure.get_size_inches()
    top_in = 0.08
    for text, size, colour, weight in _layout_header_lines(title, subtitle, width_in):
        text_artist = figure.text(
            0.08 / width_in, 1 - top_in / height_in, text, va="top", size=size, color=colour, weight=weight
        )
        text_artist.set_in_layout(False)
        top_in += size * LINE_HEIGHT_IN_PER_POINT
    content_share = 1 - compute_header_height_in(title, subtitle, width_in) / height_in
    figure.get_layout_engine().set(rect=(0, 0, 1, content_share))  # type: ignore[union-attr, call-arg]


def compute_header_height_in(title: str, subtitle: str, width_in: float) -> float:
    """Inches that `draw_header` takes from the top of a figure."""
    return 0.14 + sum(
        size * LINE_HEIGHT_IN_PER_POINT for _, size, _, _ in _layout_header_lines(title, subtitle, width_in)
    )


def _layout_header_lines(title: str, subtitle: str, width_in: float) -> list[tuple[str, float, str, str]]:
    """Text, size in points, colour and weight of every line."""
    titles = textwrap.wrap(title, int(width_in * 10.4))
    subtitle_lines = [part for line in subtitle.splitlines() for part in textwrap.wrap(line, int(width_in * 13.2))]
    title_lines: list[tuple[str, float, str, str]] = [(line, 10, style.INK_COLOUR, "bold") for line in titles]
    return title_lines + [(line, 7.5, style.MUTED_COLOUR, "normal") for line in subtitle_lines]


CAPTION_POINTS = 7.5
CAPTION_CHARS_PER_IN = 17
"""Characters of a caption that fit an inch, on the safe side."""


def save_drawing(drawing: Drawing, folder: Path) -> str:
    """Write ``<name>.png`` and ``<name>.svg`` to `folder`, each with its caption below it, and return the text of an
    SVG without, for a page that has the caption as text.

    The same rows give the same bytes, on any day.
    """
    caption = draw_caption(drawing)
    with style.apply_report_style():
        pixels = np.vstack([_render_pixels(figure) for figure in (drawing.figure, caption)])
        matplotlib.image.imsave(folder / f"{drawing.name}.png", pixels, dpi=style.RC_PARAMS["savefig.dpi"])
    drawing.figure.set_layout_engine("none")  # laid out once, the same in both files
    text = render_svg(drawing.figure)
    (folder / f"{drawing.name}.svg").write_text(_stack_svg(text, render_svg(caption)), encoding="utf-8")
    return text


def draw_caption(drawing: Drawing) -> Figure:
    """The caption and the notes as a figure of the drawing's width."""
    width_in = drawing.figure.get_figwidth()
    lines = [
        line
        for text in (drawing.caption, *drawing.notes)
        for line in textwrap.wrap(text, int(width_in * CAPTION_CHARS_PER_IN))
    ]
    dpi = style.RC_PARAMS["savefig.dpi"]
    height_px = round((0.08 + len(lines) * CAPTION_POINTS * LINE_HEIGHT_IN_PER_POINT) * dpi)
    figure = Figure(figsize=(width_in, height_px / dpi), facecolor="white")
    for position, line in enumerate(lines):
        top_in = position * CAPTION_POINTS * LINE_HEIGHT_IN_PER_POINT
        figure.text(
            0.08 / width_in,
            1 - top_in / (height_px / dpi),
            line,
            va="top",
            size=CAPTION_POINTS,
            color=style.MUTED_COLOUR,
            family=style.RC_PARAMS["font.family"],
        )
    return figure


def _render_pixels(figure: Figure) -> np.ndarray:
    """RGBA, as a PNG of the figure has them."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba")
    width_px = int(figure.get_figwidth() * style.RC_PARAMS["savefig.dpi"])
    return np.frombuffer(buffer.getvalue(), np.uint8).reshape(-1, width_px, 4)


def _stack_svg(first: str, second: str) -> str:
    """Two SVG files of one width as one, the second below the first."""
    bodies, width, height = [], 0.0, 0.0
    for text in (first, second):
        root = re.search(r"<svg [^>]*>", text)
        assert root is not None
        sizes = {name: float(value) for name, value in re.findall(r'(width|height)="([\d.]+)pt"', root[0])}
        unitless_root = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', root[0])
        bodies.append(unitless_root.replace("<svg ", f'<svg y="{height:g}" ', 1) + text[root.end() :])
        height += sizes["height"]
        width = max(width, sizes["width"])
    size = f'width="{width:g}pt" height="{height:g}pt" viewBox="0 0 {width:g} {height:g}"'
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<?xml version="1.0" encoding="utf-8"?>\n<svg {namespaces} {size}>\n{bodies[0]}{bodies[1]}</svg>\n'


def render_svg(figure: Figure) -> str:
    """The figure as the text of an SVG file; the same rows give the same text, on any day."""
    buffer = io.StringIO()
    with style.apply_report_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
