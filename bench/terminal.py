"""What commands print: text that users typed or rows brought along is shown as it is, and never as anything else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from bench.errors import escape_unprintable


class PlainConsole(Console):
    """rich's console without markup and emoji codes, and with control characters as their escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        """As rich does it, before widths are measured."""
        return super().render_str(_escape_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does it; what a terminal is told (move the cursor, clear a line) stays as it is."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield segment._replace(text=_escape_lines(segment.text))


def _escape_lines(text: str) -> str:
    """Text whose lines are printable."""
    return "\n".join(map(escape_unprintable, text.split("\n")))


def open_stdout_console(width: int) -> PlainConsole:
    """The standard output, as wide as its terminal, or `width` columns where it is none."""
    return PlainConsole() if sys.stdout.isatty() else PlainConsole(width=width)
