"""The claims of papers and notes, for the page that shows them: verdicts, and searches for unstated settings."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from docutils import nodes
from page_commands import ROOT
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bench.claims.claim import Assessment
from bench.claims.page import assess_all, render_claims, render_summary
from bench.claims.settings_search import SearchResult, SettingsSearch, read_search_result
from bench.claims.unstated_page import (
    find_last_reproduced,
    find_last_stage,
    render_common,
    render_counts,
    render_grid,
    render_nearest,
)
from bench.claims.unstated_settings import SEARCHES, get_result_path

FIGURES_FOLDER = ROOT / "build" / "docs" / "claims"
NUM_SHOWN = 5


@functools.cache
def _assess() -> dict[str, Assessment]:
    return assess_all()


def write_claim_summary() -> str:
    """How many of each verdict, and a table of all claims."""
    return render_summary(_assess())


def write_claims() -> str:
    """Every claim with its evidence."""
    return render_claims(_assess())


@functools.cache
def _read(name: str) -> tuple[SettingsSearch, SearchResult]:
    return SEARCHES[name](), read_search_result(get_result_path(name))


def write_search(name: str) -> str:
    """The grid of a search, and how many settings reproduce each group of points."""
    search, result = _read(name)
    return f"{render_grid(search)}\n{render_counts(result)}"


def write_nearest_settings(name: str) -> str:
    """The settings nearest to the last group of points that any comes near, and all before."""
    search, result = _read(name)
    return render_nearest(search, find_last_stage(result), NUM_SHOWN)


def write_common_settings(name: str) -> str:
    """What settings have in common that reproduce as many groups of points as any; a sentence where there are none."""
    search, result = _read(name)
    stage = find_last_reproduced(result)
    return render_common(search, stage) if stage else "No setting reproduces even the first group.\n"


class SearchFigureDirective(SphinxDirective):
    """``{search-figure} NAME``: how far the nearest settings are off the points of a figure."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The figure with its caption."""
        from bench.claims.unstated_figure import describe_search_figure, draw_search_figure

        (name,) = self.arguments
        search, result = _read(name)
        FIGURES_FOLDER.mkdir(parents=True, exist_ok=True)
        path = FIGURES_FOLDER / f"{name}.svg"
        draw_search_figure(search, result, path)
        caption = describe_search_figure(search, result)
        uri = os.path.relpath(path, Path(self.env.doc2path(self.env.docname)).parent)
        image = nodes.image(uri=uri, alt=caption, classes=["figure-from-rows"])
        figure = nodes.figure("", image, nodes.caption(caption, caption))
        self.set_source_info(figure)
        return [figure]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("search-figure", SearchFigureDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
