"""What pages take from the code and from rows: ``[[= expression =]]`` and the directive ``sequence``.

``[[= expression =]]`` in a page is replaced before it is parsed.

Expressions call the functions of `reference_tables` (commands, configuration, columns, strategies, Python API),
`row_numbers` (numbers of committed rows) and `claim_pages` (verdicts on claims). A name that does not exist stops the
build.
"""

from __future__ import annotations

import html
import importlib.util
import inspect
from typing import Any

import claim_pages
import reference_tables
import row_numbers
from docutils import nodes
from jinja2 import Environment, StrictUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

OPEN, CLOSE = "[[=", "=]]"


def build_environment() -> Environment:
    """Jinja with every public function of the three modules."""
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
    for module in (reference_tables, row_numbers, claim_pages):
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


class SequenceDirective(SphinxDirective):
    """A picture of modules in the order in which they are entered, as boxes; its argument says what it shows.

    Lines are ``MODULE | WHAT IT DOES``; ``--- TITLE`` begins a group, such as a process. A module that does not exist
    stops the build. Boxes are as wide as the page lets them be, in the page's colours, light or dark.
    """

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """One box per line, an arrow between two of a group."""
        parts: list[str] = []
        for line in filter(None, map(str.strip, self.content)):
            if line.startswith("---"):
                parts.append(f'<p class="sequence-group">{html.escape(line.strip("- "))}</p>')
                continue
            module, _, text = (part.strip() for part in line.partition("|"))
            if not text or importlib.util.find_spec(module) is None:
                raise self.error(f"sequence: there is no module {module}, or nothing is said of it")
            name = html.escape(module).replace(".", ".<wbr>")
            parts.append(f'<div class="sequence-box"><code>{name}</code><br>{html.escape(text)}</div>')
        caption = f"<figcaption>{html.escape(self.arguments[0])}</figcaption>"
        return [nodes.raw("", f'<figure class="sequence">{"".join(parts)}{caption}</figure>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", fill_page)
    app.add_directive("sequence", SequenceDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
