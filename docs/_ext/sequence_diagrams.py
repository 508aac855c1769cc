"""The directive ``sequence``: what happens one after the other, and which module does it, drawn as SVG.

Its lines are ``MODULE | WHAT IT DOES``; ``--- TITLE`` begins a group, such as a process. A module that does not exist stops
the build. Colours are those of the page, light or dark.
"""

from __future__ import annotations

import html
import importlib.util
import textwrap
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

WIDTH, LEFT, PADDING, LINE_HEIGHT, GAP = 680, 24, 10, 17, 16
CHARACTERS_PER_LINE = 84


class SequenceDirective(SphinxDirective):
    """A picture of modules in the order in which they are entered."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The picture, with its argument as the description for those who cannot see it."""
        parts: list[str] = []
        top = 4
        previous_bottom: int | None = None
        for line in filter(None, map(str.strip, self.content)):
            if line.startswith("---"):
                title = html.escape(line.strip("- "))
                parts.append(f'<text class="sequence-group" x="{LEFT}" y="{top + 22}">{title}</text>')
                top, previous_bottom = top + 34, None
                continue
            module, _, text = (part.strip() for part in line.partition("|"))
            if not text or importlib.util.find_spec(module) is None:
                raise self.error(f"sequence: there is no module {module}, or nothing is said of it")
            if previous_bottom is not None:
                parts.append(_draw_arrow(previous_bottom, top))
            lines = textwrap.wrap(text, CHARACTERS_PER_LINE)
            height = 2 * PADDING + LINE_HEIGHT * (1 + len(lines))
            parts.append(_draw_box(module, lines, top, height))
            previous_bottom = top + height
            top = previous_bottom + GAP
        svg = (
            f'<svg viewBox="0 0 {WIDTH} {top}" role="img" aria-label="{html.escape(self.arguments[0], quote=True)}" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
        )
        return [nodes.raw("", f'<div class="diagram">{svg}</div>', format="html")]


def _draw_box(module: str, lines: list[str], top: int, height: int) -> str:
    texts = "".join(
        f'<text class="sequence-text" x="{LEFT + PADDING}" y="{top + PADDING + LINE_HEIGHT * (number + 2) - 4}">'
        f"{html.escape(line)}</text>"
        for number, line in enumerate(lines)
    )
    return (
        f'<rect class="sequence-box" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 4}" height="{height}" rx="6"/>'
        f'<text class="sequence-module" x="{LEFT + PADDING}" y="{top + PADDING + LINE_HEIGHT - 4}">'
        f"{html.escape(module)}</text>{texts}"
    )


def _draw_arrow(start: int, end: int) -> str:
    x = LEFT + 20
    return (
        f'<path class="sequence-arrow" d="M {x} {start} L {x} {end - 6}"/>'
        f'<path class="sequence-head" d="M {x - 5} {end - 8} L {x + 5} {end - 8} L {x} {end - 1} Z"/>'
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("sequence", SequenceDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
