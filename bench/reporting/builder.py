"""From a store to a folder with one page and its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd

from bench.config.flop_conventions import ConvertedSpeeds
from bench.core import presentation
from bench.core.errors import UsageError
from bench.core.files import replace_file
from bench.core.presentation import format_plural
from bench.records import StoreContents, read_latest_attempts
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import ReportFigure, ReportSection, save_drawing
from bench.reporting.figures import FIGURE_MODULES
from bench.reporting.findings import find_topics, news
from bench.reporting.page import page
from bench.reporting.page.interactive import build_explorer_charts, build_scaling_charts
from bench.reporting.tables.frontier import drop_batch_search_tries
from bench.reporting.tables.table import prepare_table

MANIFEST_FILE = ".written-by-report"
"""In the figures' folder: names of the files an earlier report left there, which the next one replaces."""


MAX_FIGURES = 40
"""Figures that a report draws unless it is asked for more: each takes half a second. So many show more than a page
can be read for; a part of a large store is better reported alone."""


def build_report(store: str | Path, output: str | Path, *, interactive: bool = True) -> Path:
    """Draw the report of everything below `store` into the folder `output`.

    Parameters
    ----------
    store: path
        A store, a folder of stores, one run's folder or one row file. Its rows are only read.
    output: path
        Folder for ``index.html`` (complete in itself) and ``figures/*.png`` and ``*.svg``; made if missing. Figures of
        an earlier report in the same folder are replaced, other files are left alone.
    interactive: bool
        Whether the page has figures to hover over, too: the library that draws them makes it 2 MB larger.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    UsageError
        If there is no such store, it holds no row, or `output` cannot be written.
    """
    return write_report(read_store(store), str(store), output, interactive=interactive)


def write_report(
    contents: StoreContents,
    store_name: str,
    output: str | Path,
    *,
    interactive: bool = True,
    max_figures: int = MAX_FIGURES,
    speeds: ConvertedSpeeds | None = None,
) -> Path:
    """Draw the report of rows already read; `store_name` says where they come from. Returns the page's path.

    Parameters
    ----------
    max_figures: int
        The most static figures to draw; of every section the first ones, and how many there would be is said.
    speeds: ConvertedSpeeds, optional
        The speeds that are shown; None for the model's own FLOPs.

    Raises
    ------
    UsageError
        If `output` cannot be written.
    """
    output = Path(output)
    table = prepare_table(contents.records, speeds)
    palette = style.build_palette(table["variant_key"])
    final_runs = drop_batch_search_tries(table)
    with style.apply_report_style():
        all_sections = [
            _build_section(module, table if module.FIGURE.shows_all_trials else final_runs, palette)
            for module in FIGURE_MODULES
        ]
    sections = [section for section in all_sections if section.planned_figures or section.tables or section.notice]
    charts = [*build_explorer_charts(table, palette), *build_scaling_charts(final_runs, palette)] if interactive else []
    try:
        (output / "figures").mkdir(parents=True, exist_ok=True)
        svg_texts = _save_figures(sections, output / "figures", max_figures)
        topics = find_topics(final_runs, table, news.read_reported_runs(output))
        speed_note = speeds.note if speeds else ""
        html = page.render_page(store_name, contents, table, sections, svg_texts, topics, charts, speed_note)
        replace_file(output / "index.html", html)
        news.write_reported_runs(output, news.list_reported_runs(table))
    except OSError as error:
        raise UsageError(f"Cannot write to {output} ({error.strerror}): choose another folder with --output.") from None
    return output / "index.html"


def _build_section(
    figure_module: ModuleType, table: pd.DataFrame, palette: dict[str, style.VariantStyle]
) -> ReportSection:
    """What a figure module makes of a table; nothing of it runs where the table lacks what the figure needs."""
    figure: ReportFigure = figure_module.FIGURE
    if not figure.needs.are_met_by(table):
        return figure.create_empty_section(table)
    section: ReportSection = figure_module.build_section(table, palette)
    return section


def _save_figures(sections: list[ReportSection], folder: Path, max_figures: int) -> dict[str, str]:
    """Draw and write the figures of every section; SVG texts by name."""
    manifest = folder / MANIFEST_FILE
    if manifest.is_file():
        for name in manifest.read_text().splitlines():
            if Path(name).name == name:
                (folder / name).unlink(missing_ok=True)
    svg_texts: dict[str, str] = {}
    num_planned = sum(len(section.planned_figures) for section in sections)
    manifest.write_text("")
    for section, figure_count in zip(
        sections, _distribute_figures([len(section.planned_figures) for section in sections], max_figures), strict=True
    ):
        for drawing in section.draw_figures(figure_count):
            stem, suffix = drawing.name, 2
            while drawing.name in svg_texts:
                drawing.name, suffix = f"{stem}-{suffix}", suffix + 1
            with manifest.open("a") as manifest_file:
                manifest_file.writelines(f"{drawing.name}.{ending}\n" for ending in ("png", "svg"))
            svg_texts[drawing.name] = save_drawing(drawing, folder)
            drawing.figure.clear()  # a report of many would hold them all
        if figure_count < len(section.planned_figures):
            left_out_note = _describe_left_out(figure_count, len(section.planned_figures), num_planned)
            section.notice = f"{section.notice} {left_out_note}".strip()
    return svg_texts


def _distribute_figures(planned_counts: list[int], max_figures: int) -> list[int]:
    """How many figures each section draws, `max_figures` together: evenly, and none more than it has."""
    drawn_counts = [0] * len(planned_counts)
    while max_figures > 0 and any(drawn < planned for drawn, planned in zip(drawn_counts, planned_counts, strict=True)):
        for index, planned in enumerate(planned_counts):
            if drawn_counts[index] < planned and max_figures > 0:
                drawn_counts[index] += 1
                max_figures -= 1
    return drawn_counts


def _describe_left_out(drawn: int, planned: int, planned_in_all: int) -> str:
    return (
        f"{presentation.format_plural(drawn, 'figure')} of {planned} drawn: give bench.report a part of the store, or "
        f"--figures {planned_in_all} to draw all of all sections."
    )


# --- Reading rows that somebody named: a sentence where there are none.


def read_store(
    path: str | Path, read_contents: Callable[[Path], StoreContents] = read_latest_attempts
) -> StoreContents:
    """The rows below `path`: the latest of every run, unless another way to read them is given.

    Raises
    ------
    UsageError
        If there is no such path or no row below it.
    """
    try:
        contents = read_contents(Path(path))
    except FileNotFoundError:
        raise UsageError(f"There is no store at {path}: choose a store, a folder of stores or a row file.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not contents.records:
        left_out_note = f" ({format_plural(len(contents.unreadable), 'file')} left out)" if contents.unreadable else ""
        raise UsageError(f"{path} holds no rows{left_out_note}: choose a store, a folder of stores or a row file.")
    return contents


def describe_unreadable(contents: StoreContents, name: str = "") -> list[str]:
    """How many files of a store were left out, and the first reason; nothing if all could be read."""
    if not contents.unreadable:
        return []
    of_store = f" of {name}" if name else ""
    return [f"{format_plural(len(contents.unreadable), 'file')}{of_store} left out: {contents.unreadable[0]}"]
