"""The directive ``sequence``: what happens one after the other, and which module does it, drawn as boxes and arrows.

Its lines are ``MODULE | WHAT IT DOES``; ``--- TITLE`` begins a group, such as a process. A module that does not exist
stops the build. Boxes are as wide as the page lets them be, in the page's colours, light or dark.
"""

from __future__ import annotations

import html
import importlib.util
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class SequenceDirective(SphinxDirective):
    """A picture of modules in the order in which they are entered; its argument says what it shows."""

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
    app.add_directive("sequence", SequenceDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
