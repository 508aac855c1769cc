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

from bench.config.flop_conventions import convert_speeds
from bench.core import presentation
from bench.records import Record, read_latest_attempts
from bench.records.published import PUBLISHED_CSV, read_published_records
from bench.reporting.builder import read_store
from bench.reporting.drawing import drawing, style
from bench.reporting.drawing.drawing import Drawing, FigureTable, ReportSection
from bench.reporting.tables.frontier import drop_batch_search_tries
from bench.reporting.tables.table import prepare_table

RESULTS_DIR = PUBLISHED_CSV.parents[1]
"""The committed rows: ``measured`` and ``predicted`` are stores below it, ``published`` is a file of its own kind."""
COMMITTED_STORES = ("predicted", "measured")
PIXELS_PER_INCH = 125
"""How large a figure is shown; it can be enlarged, as it is an SVG."""


@dataclass(frozen=True)
class CellOutput:
    """Something a cell ends with: Jupyter shows its HTML, or its text where there is none."""

    html: str
    text: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
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
    figures_dir: str | Path | None = None
    """A folder: every static figure that is shown is also saved there, as PNG and as SVG. None saves nothing."""
    results_dir: Path = RESULTS_DIR
    flops: str = "model"
    """What FLOPs the TFLOP/s and MFU of figures count: one of `bench.config.flop_conventions.FLOP_CONVENTIONS`."""
    _committed_records: list[Record] = field(default_factory=list, init=False, repr=False)
    _own_records: list[Record] = field(default_factory=list, init=False, repr=False)
    _has_plotly_js: bool = field(default=False, init=False, repr=False)
    """Whether the library that draws interactive figures has been put into the page."""

    def __post_init__(self) -> None:
        for name in COMMITTED_STORES:
            if (self.results_dir / name).is_dir():
                self._committed_records += read_latest_attempts(self.results_dir / name).records
        if self.store is not None:
            self._own_records = read_store(self.store).records

    def select_records(self, **columns: Any) -> list[Record]:
        """Rows whose columns have these values (or one of several, as a tuple): committed ones, then one's own."""
        return [row for row in (*self._committed_records, *self._own_records) if _has_values(row, columns)]

    def build_table(self, **columns: Any) -> pd.DataFrame:
        """The same rows as the table that figures are drawn from."""
        records = self.select_records(**columns)
        return prepare_table(records, convert_speeds(self.flops, records))

    def describe_rows(self) -> CellOutput:
        """Which rows there are, by kind of evidence and device."""
        committed_rows = [("results/", row) for row in (*read_published_records(), *self._committed_records)]
        rows_by_origin: dict[tuple[str, str], list[Record]] = {}
        for origin, row in (*committed_rows, *(("your store", row) for row in self._own_records)):
            rows_by_origin.setdefault((origin, row["evidence"]), []).append(row)
        rows = [
            {
                "Rows from": origin,
                "Evidence": evidence,
                "Rows": str(len(group)),
                "Hardware": ", ".join(sorted({row.get("hardware") or "other" for row in group})),
            }
            for (origin, evidence), group in rows_by_origin.items()
        ]
        return self.show(pd.DataFrame(rows))

    def draw_section(self, draw: Callable[..., ReportSection], table: pd.DataFrame, **options: Any) -> ReportSection:
        """Draw with a figure module's `section`, in the project's style."""
        with style.apply_report_style():
            return draw(table, style.build_palette(table["variant_key"]), **options)

    def draw_own_store(self, *figure_modules: Any) -> CellOutput:
        """What figure modules draw of one's own store; without a store, how to give one."""
        if self.store is None:
            message = (
                "No store of your own was given. With <code>STORE</code> set in the first cell, or by the command "
            )
            command = "python -m bench.notebooks store=DIR"
            return CellOutput(f"<p>{message}<code>{command}</code>, its figures are drawn here.</p>",
                         f"No store of your own was given: {command}")  # fmt: skip
        all_runs = prepare_table(self._own_records, convert_speeds(self.flops, self._own_records))
        final_runs = drop_batch_search_tries(all_runs)
        parts = []
        for figure_module in figure_modules:
            section = self.draw_section(
                figure_module.build_section, all_runs if figure_module.FIGURE.shows_all_trials else final_runs
            )
            parts.append(self.show(section))
        return CellOutput("".join(part.html for part in parts), "\n".join(part.text for part in parts))

    def show(self, item: ReportSection | Drawing | FigureTable | pd.DataFrame | go.Figure) -> CellOutput:
        """A section with all its figures and tables, or one of these, as a page shows it."""
        if isinstance(item, ReportSection):
            parts = [self.show(element) for element in (*item.drawings, *item.tables)]
            intro = "".join(f"<p>{html.escape(text)}</p>" for text in (item.how_to_read, item.notice) if text)
            return CellOutput(intro + "".join(part.html for part in parts), "\n".join(part.text for part in parts))
        if isinstance(item, Drawing):
            return self._show_drawing(item)
        if isinstance(item, FigureTable):
            table_html = _format_html_table(item.columns, item.rows, item.numeric_columns)
            details_html = f"<details><summary>{html.escape(item.title)}</summary>{table_html}</details>"
            return CellOutput(details_html, item.title)
        if isinstance(item, pd.DataFrame):
            columns = [str(name) for name in item.columns]
            cells = [[str(value) for value in row] for row in item.itertuples(index=False)]
            return CellOutput(
                _format_html_table(columns, cells, _find_numeric_columns(columns, cells)), item.to_string(index=False)
            )
        return self._show_plotly_figure(item)

    def _show_drawing(self, item: Drawing) -> CellOutput:
        if self.figures_dir is not None:
            folder = Path(self.figures_dir)
            folder.mkdir(parents=True, exist_ok=True)
            svg_text = drawing.save_drawing(item, folder)
        else:
            svg_text = drawing.render_svg(item.figure)
        image = base64.b64encode(svg_text.encode()).decode()
        width = round(item.figure.get_figwidth() * PIXELS_PER_INCH)
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in item.notes)
        figure_html = (
            f'<figure><img src="data:image/svg+xml;base64,{image}" alt="{html.escape(item.alt, quote=True)}" '
            f'style="width:{width}px;max-width:100%"><figcaption>{html.escape(item.caption)}'
            f"{f'<ul>{notes}</ul>' if notes else ''}</figcaption></figure>"
        )
        return CellOutput(figure_html, item.alt)

    def _show_plotly_figure(self, figure: go.Figure) -> CellOutput:
        """An interactive figure; the first one brings the library, so that the page works offline."""
        library_script = "" if self._has_plotly_js else f"<script>{plotly.offline.get_plotlyjs()}</script>"
        self._has_plotly_js = True
        figure_html = figure.to_html(
            full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
        )
        title = figure.layout.title.text or ""
        intro = f"<p><em>{html.escape(title)}: interactive, hover over a point for its numbers.</em></p>"
        return CellOutput(f"{library_script}{intro}{figure_html}", f"{title} (interactive)")


def _has_values(row: Mapping[str, Any], required_values: Mapping[str, Any]) -> bool:
    return all(
        row.get(name) in (value if isinstance(value, tuple) else (value,)) for name, value in required_values.items()
    )


def _find_numeric_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> frozenset[str]:
    """Columns in which every cell is a number, with a unit or without, or missing: they are aligned to the right."""
    number_pattern = re.compile(rf"[+−-]?[\d,.]+( ?\S{{1,3}})?|{presentation.MISSING}|")
    return frozenset(
        name for index, name in enumerate(columns) if rows and all(number_pattern.fullmatch(row[index]) for row in rows)
    )


def _format_html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric_columns: frozenset[str]) -> str:
    def format_line(tag: str, values: Sequence[str]) -> str:
        cells = zip(columns, values, strict=True)
        return "".join(
            f'<{tag} style="text-align:{"right" if name in numeric_columns else "left"}">{html.escape(value)}</{tag}>'
            for name, value in cells
        )

    body = "".join(f"<tr>{format_line('td', row)}</tr>" for row in rows)
    head = f"<tr>{format_line('th', columns)}</tr>"
    return f'<div class="table"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
