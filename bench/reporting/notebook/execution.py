"""Carrying out a notebook in a kernel of its own, and turning it into one page that works offline.

Needs the libraries of the extra ``notebooks``.
"""

from __future__ import annotations

import os
import re
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from traitlets.config import Config

from bench.core.installation import PACKAGE_FOLDER

PARAMETERS_TAG = "parameters"
"""Tag of the cell whose values are set from outside, as papermill calls it."""
TEMPLATE_FILE = "notebook.html.j2"
CELL_TIMEOUT_S = 600
"""Seconds one cell may take."""


class NotebookFailedError(RuntimeError):
    """A cell raised, or wrote to stderr."""


def set_parameters(notebook: nbformat.NotebookNode, values: dict[str, Any]) -> nbformat.NotebookNode:
    """Set names in the cell tagged ``parameters``, keeping the comments behind them; names it does not have are left.

    Raises
    ------
    ValueError
        If there is not one such cell.
    """
    (cell,) = [cell for cell in notebook.cells if PARAMETERS_TAG in cell.metadata.get("tags", [])]
    for name, value in values.items():
        line = f"{name} = {value!r}".replace("\\", r"\\")
        cell.source = re.sub(rf"(?m)^{name} = [^#\n]*?(?=  #|$)", line, cell.source)
    return notebook


def execute_notebook(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Carry out all cells from top to bottom in `folder`; outputs are put into the notebook.

    The kernel sees this code, whether it is installed or not, and no configuration of the user's.

    Raises
    ------
    NotebookFailedError
        Naming the cell, if one raises or writes to stderr.
    """
    with tempfile.TemporaryDirectory(prefix="bench-notebook-") as scratch_dir:
        python_paths = [str(PACKAGE_FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(python_paths),
            "IPYTHONDIR": scratch_dir,
            "JUPYTER_RUNTIME_DIR": scratch_dir,
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        # Sockets that are files nobody else may open, instead of ports.
        sockets = {"transport": "ipc", "ip": f"{scratch_dir}/kernel", "connection_file": f"{scratch_dir}/kernel.json"}
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            config=Config(KernelManager=sockets),
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
        )
        try:
            client.execute(env=environment)
        except CellExecutionError as error:
            raise NotebookFailedError(
                f"{_describe_failed_cell(notebook)} failed: {error.ename}: {error.evalue}"
            ) from None
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", ()):
            if output.output_type == "stream" and output.name == "stderr":
                raise NotebookFailedError(f"cell {number} wrote to stderr: {output.text.strip()}")


def _describe_failed_cell(notebook: nbformat.NotebookNode) -> str:
    """The cell that raised, and how it begins."""
    for number, cell in enumerate(notebook.cells, 1):
        if any(output.output_type == "error" for output in cell.get("outputs", ())):
            return f"cell {number} ({cell.source.strip().splitlines()[0]})"
    return "a cell"


FIGURE_TITLE = re.compile(r"(?:set_title|plt\.title|title=)\(?\s*[\"'](.+?)[\"']")


def _describe_images(notebook: nbformat.NotebookNode) -> None:
    """Give pictures that cells draw with matplotlib an alternative text: the title that the cell sets."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                match = FIGURE_TITLE.search(cell.source)
                title = match[1] if match else "a figure"
                output.metadata["image/png"] = {"alt": f"{title}: drawn by the cell above from its table."}


def render_page(notebook: nbformat.NotebookNode, title: str) -> str:
    """The notebook with its outputs as one HTML page that loads nothing from elsewhere."""
    _describe_images(notebook)
    text = files("bench.reporting.notebook").joinpath(TEMPLATE_FILE).read_text(encoding="utf-8")
    exporter = HTMLExporter(
        extra_loaders=[jinja2.DictLoader({TEMPLATE_FILE: text})], template_file=TEMPLATE_FILE, exclude_anchor_links=True
    )
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    return body
