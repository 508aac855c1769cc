"""Figures of committed rows: ``python -m bench.report`` draws them while the site is built, once per state of the rows.

The directive ``report-figure`` shows one by the name of its file, with the caption and the description for those who
cannot see it that the report gives; the whole report of a store is a page of the site, too (``reports/STORE``). Where
a share of the pages is executed, the same share of the reports is drawn.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from page_commands import NOT_DRAWN, NUM_PROCESSES, ROOT, draw_pages, hash_files
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

REPORTS_FOLDER = ROOT / "build" / "docs" / "extra" / "reports"

STORES = {
    "paper": ("predicted/a100_80gb",),
    "cpu_frontier": ("measured/cpu_frontier", "predicted/cpu_frontier"),
    "oom_frontier": ("predicted/oom_frontier",),
    "default_sweep": ("measured/cpu_2core",),
    "strategies": ("measured/strategies",),
    "pipelines": ("measured/cpu_pipelines",),
    "h200": ("measured/h200",),
    "h100": ("measured/h100",),
    "frameworks": ("measured/cpu_frameworks",),
}
"""Folders of ``results`` by the names of their reports on the site, those that take longest first."""

MAX_FIGURES = 60
"""Of a report: more than it draws unless it is asked to, as pages of the site show some of the later ones."""

FIGURE_PATTERN = re.compile(r'data-figure="([^"]+)" alt="([^"]*)".*?<figcaption>(.*?)<span', re.DOTALL)


def draw_reports(app: Sphinx) -> None:
    """Draw the report of every store whose rows, or the code, have changed, if it is in this build's share."""
    code_hash = hash_files("bench", "conf", "results/published")
    drawn = draw_pages([f"reports/{name}" for name in STORES])
    with ThreadPoolExecutor(NUM_PROCESSES) as executor:
        list(executor.map(lambda page: _draw_report(page.removeprefix("reports/"), code_hash), drawn))


def _draw_report(name: str, code_hash: str) -> None:
    folder = REPORTS_FOLDER / name
    rows_hash = hash_files(*(f"results/{store}" for store in STORES[name]))
    mark_file, mark = folder / ".drawn-from", f"{code_hash} {rows_hash}"
    if mark_file.is_file() and mark_file.read_text() == mark:
        return
    with tempfile.TemporaryDirectory() as stores:
        for store in STORES[name]:
            shutil.copytree(ROOT / "results" / store, Path(stores, "results", store))
        command = [sys.executable, "-m", "bench.report", "results", "--output", str(folder), "--no-interactive"]
        command += ["--figures", str(MAX_FIGURES)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=stores, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExtensionError(f"{' '.join(command[1:])} of {name} ended with {done.returncode}: {done.stderr}")
    page = (folder / "index.html").read_text(encoding="utf-8")
    captions = {
        figure: {"alt": html.unescape(alt), "caption": html.unescape(re.sub(r"<[^>]+>", "", caption)).strip()}
        for figure, alt, caption in FIGURE_PATTERN.findall(page)
    }
    (folder / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    mark_file.write_text(mark)


class ReportFigureDirective(SphinxDirective):
    """``{report-figure} STORE NAME``: the figures of a store's report whose names match (``*`` stands for anything)."""

    required_arguments = 2
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """The figures with their captions."""
        store, pattern = self.arguments
        folder = REPORTS_FOLDER / store
        if not (folder / "captions.json").is_file():
            return [nodes.literal_block(NOT_DRAWN, NOT_DRAWN, language="text")]
        captions = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
        paths = sorted((folder / "figures").glob(f"{pattern}.svg"))
        if not paths:
            raise self.error(f"the report of {', '.join(STORES[store])} has no figure {pattern}")
        self.env.note_dependency(folder / "captions.json")
        return [self._build_figure(path, captions[path.stem]) for path in paths]

    def _build_figure(self, path: Path, texts: dict[str, str]) -> nodes.figure:
        uri = os.path.relpath(path, Path(self.env.doc2path(self.env.docname)).parent)
        image = nodes.image(uri=uri, alt=texts["alt"], classes=["figure-from-rows"])
        caption = nodes.caption(texts["caption"], texts["caption"])
        figure = nodes.figure("", image, caption)
        self.set_source_info(figure)
        return figure


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.config.html_extra_path.append(str(REPORTS_FOLDER.parent))
    REPORTS_FOLDER.mkdir(parents=True, exist_ok=True)
    app.connect("builder-inited", draw_reports)
    app.add_directive("report-figure", ReportFigureDirective)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
