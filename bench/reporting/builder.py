"""From a store to a folder with one page and its figures."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bench.errors import UsageError
from bench.records import Contents
from bench.reporting import labels, page, style
from bench.reporting.drawing import Section, save
from bench.reporting.figures import EVERY_RUN, FIGURES
from bench.reporting.frontier_cells import without_tries
from bench.reporting.interactive import explorer, lines
from bench.reporting.reading import read_store
from bench.reporting.table import prepare

MANIFEST = ".written-by-report"
"""In the figures' folder: names of the files an earlier report left there, which the next one replaces."""


MOST_FIGURES = 60
"""Figures that a report draws unless it is asked for more: each takes half a second. So many show more than a page
can be read for; a part of a large store is better reported alone."""


def build(store: str | Path, output: str | Path, *, interactive: bool = True) -> Path:
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
    contents: Contents, name: str, output: str | Path, *, interactive: bool = True, figures: int = MOST_FIGURES
) -> Path:
    """Draw the report of rows already read; `name` says where they come from. Returns the page's path.

    Parameters
    ----------
    figures: int
        The most static figures to draw; of every section the first ones, and how many there would be is said.

    Raises
    ------
    UsageError
        If `output` cannot be written.
    """
    output = Path(output)
    table = prepare(contents.records)
    marks = style.palette(table["variant_key"])
    ends = without_tries(table)
    with style.context():
        made = [figure.section(table if figure in EVERY_RUN else ends, marks) for figure in FIGURES]
    sections = [section for section in made if section.planned or section.listings or section.nothing]
    charts = [*explorer(table, marks), *lines(ends, marks)] if interactive else []
    try:
        (output / "figures").mkdir(parents=True, exist_ok=True)
        images = _save_all(sections, output / "figures", figures)
        html = page.render(name, contents, table, sections, images, charts)
        _replace(output / "index.html", html)
    except OSError as error:
        raise UsageError(f"Cannot write to {output} ({error.strerror}): choose another folder with --output.") from None
    return output / "index.html"


def _save_all(sections: list[Section], folder: Path, most: int) -> dict[str, str]:
    """Draw and write the figures of every section; SVG texts by name."""
    manifest = folder / MANIFEST
    if manifest.is_file():
        for name in manifest.read_text().splitlines():
            if Path(name).name == name:
                (folder / name).unlink(missing_ok=True)
    images: dict[str, str] = {}
    manifest.write_text("")
    for section, share in zip(sections, _shares([len(section.planned) for section in sections], most), strict=True):
        for drawing in section.draw(share):
            stem, number = drawing.name, 2
            while drawing.name in images:
                drawing.name, number = f"{stem}-{number}", number + 1
            with manifest.open("a") as listed:
                listed.writelines(f"{drawing.name}.{ending}\n" for ending in ("png", "svg"))
            images[drawing.name] = save(drawing, folder)
            drawing.figure.clear()  # a report of many would hold them all
        if share < len(section.planned):
            section.nothing = f"{section.nothing} {_left_out(share, len(section.planned))}".strip()
    return images


def _shares(counts: list[int], most: int) -> list[int]:
    """How many figures each section draws, `most` together: evenly, and none more than it has."""
    shares = [0] * len(counts)
    while most > 0 and any(share < count for share, count in zip(shares, counts, strict=True)):
        for place, count in enumerate(counts):
            if shares[place] < count and most > 0:
                shares[place] += 1
                most -= 1
    return shares


def _left_out(drawn: int, planned: int) -> str:
    return (
        f"{labels.counted(drawn, 'figure')} of {planned} drawn: give bench.report a part of the store, or "
        f"--figures {planned} to draw more."
    )


def _replace(path: Path, text: str) -> None:
    """Write the page whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".page-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text)
    Path(temporary).replace(path)
