"""What pages take from the code and from rows: ``[[= expression =]]`` in a page is replaced before it is parsed.

Expressions call the functions of `reference_tables` (commands, configuration, columns, strategies, Python API) and
`row_numbers` (numbers of committed rows). A name that does not exist stops the build.
"""

from __future__ import annotations

import inspect
from typing import Any

import reference_tables
import row_numbers
from jinja2 import Environment, StrictUndefined
from sphinx.application import Sphinx

OPEN, CLOSE = "[[=", "=]]"


def build_environment() -> Environment:
    """Jinja with every public function of the two modules."""
    environment = Environment(
        variable_start_string=OPEN,
        variable_end_string=CLOSE,
        block_start_string="[[%",
        block_end_string="%]]",
        comment_start_string="[[#",
        comment_end_string="#]]",
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    for module in (reference_tables, row_numbers):
        functions = inspect.getmembers(module, inspect.isfunction)
        environment.globals |= {
            name: function
            for name, function in functions
            if not name.startswith("_") and function.__module__ == module.__name__
        }
    return environment


def fill_page(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Replace the expressions of one page."""
    if OPEN in source[0] or "[[%" in source[0]:
        source[0] = build_environment().from_string(source[0]).render()


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", fill_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
