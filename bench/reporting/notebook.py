"""What the notebooks under ``analysis`` call: rows to look at, and figures, tables and sentences to show.

Nothing here is computed that is not a function of the figures' own modules; a notebook adds the words.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.offline

from bench.records import Record, read_all
from bench.records.published import PUBLISHED, published_records
from bench.reporting import drawing, labels, style
from bench.reporting.drawing import Drawing, Listing, Section
from bench.reporting.figures import EVERY_RUN
from bench.reporting.frontier_cells import without_tries
from bench.reporting.reading import read_store
from bench.reporting.table import prepare

RESULTS = PUBLISHED.parents[1]
"""The committed rows: ``measured`` and ``predicted`` are stores below it, ``published`` is a file of its own kind."""
SHIPPED = ("predicted", "measured")
PIXELS_PER_INCH = 125
"""How large a figure is shown; it can be enlarged, as it is an SVG."""


@dataclass(frozen=True)
class Shown:
    """Something a cell ends with: Jupyter shows its HTML, or its text where there is none."""

    html: str
    text: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What Jupyter asks for."""
        return {"text/html": self.html, "text/plain": self.text}


@dataclass
class Notebook:
    """Rows that a notebook looks at: those committed under ``results``, and those of one's own store.

    Raises
    ------
    UsageError
        If there is no such store, or it holds no rows.
    """

    store: str | Path | None = None
    """A store of one's own, as everywhere a store, a folder of stores or one row; None for none."""
    figures: str | Path | None = None
    """A folder: every static figure that is shown is also saved there, as PNG and as SVG. None saves nothing."""
    shipped: Path = RESULTS
    _records: list[Record] = field(default_factory=list, init=False, repr=False)
    _own: list[Record] = field(default_factory=list, init=False, repr=False)
    _interactive: bool = field(default=False, init=False, repr=False)
    """Whether the library that draws interactive figures has been put into the page."""

    def __post_init__(self) -> None:
        for name in SHIPPED:
            if (self.shipped / name).is_dir():
                self._records += read_all(self.shipped / name).records
        if self.store is not None:
            self._own = read_store(self.store).records

    def records(self, **columns: Any) -> list[Record]:
        """Rows whose columns have these values (or one of several, as a tuple): committed ones, then one's own."""
        return [row for row in (*self._records, *self._own) if _has(row, columns)]

    def table(self, **columns: Any) -> pd.DataFrame:
        """The same rows as the table that figures are drawn from."""
        return prepare(self.records(**columns))

    def about(self) -> Shown:
        """Which rows there are, by kind of evidence and device."""
        shipped = [("results/", row) for row in (*published_records(), *self._records)]
        found: dict[tuple[str, str], list[Record]] = {}
        for whose, row in (*shipped, *(("your store", row) for row in self._own)):
            found.setdefault((whose, row["evidence"]), []).append(row)
        rows = [
            {
                "Rows from": whose,
                "Evidence": kind,
                "Rows": str(len(group)),
                "Hardware": ", ".join(sorted({row.get("hardware") or "other" for row in group})),
            }
            for (whose, kind), group in found.items()
        ]
        return self.show(pd.DataFrame(rows))

    def section(self, draw: Callable[..., Section], table: pd.DataFrame, **options: Any) -> Section:
        """Draw with a figure module's `section`, in the project's style."""
        with style.context():
            return draw(table, style.palette(table["variant_key"]), **options)

    def own(self, *modules: Any) -> Shown:
        """What figure modules draw of one's own store; without a store, how to give one."""
        if self.store is None:
            words = "No store of your own was given. With <code>STORE</code> set in the first cell, or by the command "
            command = "python -m bench.notebooks store=DIR"
            return Shown(f"<p>{words}<code>{command}</code>, its figures are drawn here.</p>",
                         f"No store of your own was given: {command}")  # fmt: skip
        every = prepare(self._own)
        ends = without_tries(every)
        parts = []
        for module in modules:
            section = self.section(module.section, every if module in EVERY_RUN else ends)
            parts.append(self.show(section))
        return Shown("".join(part.html for part in parts), "\n".join(part.text for part in parts))

    def show(self, thing: Section | Drawing | Listing | pd.DataFrame | go.Figure) -> Shown:
        """A section with all its figures and tables, or one of these, as a page shows it."""
        if isinstance(thing, Section):
            parts = [self.show(each) for each in (*thing.drawings, *thing.listings)]
            intro = "".join(f"<p>{html.escape(text)}</p>" for text in (thing.how_to_read, thing.nothing) if text)
            return Shown(intro + "".join(part.html for part in parts), "\n".join(part.text for part in parts))
        if isinstance(thing, Drawing):
            return self._drawing(thing)
        if isinstance(thing, Listing):
            rows = _table(thing.columns, thing.rows, thing.numbers)
            named = f"<details><summary>{html.escape(thing.title)}</summary>{rows}</details>"
            return Shown(named, thing.title)
        if isinstance(thing, pd.DataFrame):
            columns = [str(name) for name in thing.columns]
            cells = [[str(value) for value in row] for row in thing.itertuples(index=False)]
            return Shown(_table(columns, cells, _numbers(columns, cells)), thing.to_string(index=False))
        return self._figure(thing)

    def _drawing(self, thing: Drawing) -> Shown:
        if self.figures is not None:
            folder = Path(self.figures)
            folder.mkdir(parents=True, exist_ok=True)
            text = drawing.save(thing, folder)
        else:
            text = drawing.svg(thing)
        image = base64.b64encode(text.encode()).decode()
        width = round(thing.figure.get_figwidth() * PIXELS_PER_INCH)
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in thing.notes)
        page = (
            f'<figure><img src="data:image/svg+xml;base64,{image}" alt="{html.escape(thing.alt, quote=True)}" '
            f'style="width:{width}px;max-width:100%"><figcaption>{html.escape(thing.caption)}'
            f"{f'<ul>{notes}</ul>' if notes else ''}</figcaption></figure>"
        )
        return Shown(page, thing.alt)

    def _figure(self, figure: go.Figure) -> Shown:
        """An interactive figure; the first one brings the library, so that the page works offline."""
        library = "" if self._interactive else f"<script>{plotly.offline.get_plotlyjs()}</script>"
        self._interactive = True
        page = figure.to_html(
            full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
        )
        title = figure.layout.title.text or ""
        words = f"<p><em>{html.escape(title)}: interactive, hover over a point for its numbers.</em></p>"
        return Shown(f"{library}{words}{page}", f"{title} (interactive)")


def _has(row: Mapping[str, Any], columns: Mapping[str, Any]) -> bool:
    return all(row.get(name) in (value if isinstance(value, tuple) else (value,)) for name, value in columns.items())


def _numbers(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> frozenset[str]:
    """Columns in which every cell is a number, with a unit or without, or missing: they are aligned to the right."""
    numeric = re.compile(rf"[+−-]?[\d,.]+( ?\S{{1,3}})?|{labels.MISSING}|")
    return frozenset(
        name for at, name in enumerate(columns) if cells and all(numeric.fullmatch(row[at]) for row in cells)
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[str]) -> str:
    """A plain HTML table."""

    def line(tag: str, values: Sequence[str]) -> str:
        cells = zip(columns, values, strict=True)
        return "".join(
            f'<{tag} style="text-align:{"right" if name in numbers else "left"}">{html.escape(value)}</{tag}>'
            for name, value in cells
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{line("th", columns)}</tr></thead><tbody>{body}</tbody></table></div>'
