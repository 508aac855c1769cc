"""The notebooks as pages of the site: the directive ``notebooks`` lists them, and the build renders each of them."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from page_commands import draw_pages
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from bench.reporting.notebook.render import NOTEBOOKS_DIR, list_notebooks, render_notebooks

FOLDER = "notebooks"
"""Of the site."""


def read_title(name: str) -> str:
    """The question of a notebook: its first heading."""
    notebook = nbformat.read(NOTEBOOKS_DIR / f"{name}.ipynb", as_version=4)
    return str(notebook.cells[0].source.splitlines()[0].removeprefix("# "))


class NotebooksDirective(SphinxDirective):
    """A list of all notebooks, each with a link to its page."""

    def run(self) -> list[nodes.Node]:
        """The list, as HTML."""
        depth = self.env.docname.count("/")
        items = [
            f'<li><a class="reference external" href="{"../" * depth}{FOLDER}/{name}.html">'
            f"{html.escape(read_title(name))}</a> (<code>{name}</code>)</li>"
            for name in list_notebooks()
        ]
        return [nodes.raw("", f"<ul>{''.join(items)}</ul>", format="html")]


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Carry out every notebook that is drawn and write its page; one that fails fails the build."""
    if (
        error is None
        and app.builder.format == "html"
        and render_notebooks(draw_pages(list_notebooks()), {}, Path(app.outdir) / FOLDER)
    ):
        raise ExtensionError("a notebook failed")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("notebooks", NotebooksDirective)
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
