"""What every command does around its `main`: its parser, the sentence for a mistake, a quiet end at Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from bench.core.errors import UsageError, escape_unprintable, invalid_value_error, suggest_nearest

CONSOLE_SCRIPT = "fsdp-bench"
"""What pip installs beside ``python -m bench``."""

INTERRUPTED_EXIT_CODE = 130
"""Exit code of what Ctrl-C ended, as shells have it."""


def end_silently_on_interrupt() -> None:
    """Have Ctrl-C end this process silently, while it has nothing to clean up yet: for the seconds of imports.

    KeyboardInterrupt would be printed, and lost where an import happens to run a callback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where whoever started it has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class SentenceParser(argparse.ArgumentParser):
    """argparse's parser, which says in one sentence what is wrong, and of an unknown option which one is near."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and the sentence."""
        _, is_unknown, typed = message.partition("unrecognized arguments: ")
        _, is_missing, names = message.partition("the following arguments are required: ")
        if is_unknown:
            typed = typed.split()[0]
            options = [
                text
                for action in self._actions
                for text in action.option_strings or [str(action.metavar or action.dest)]
            ]
            nearest = suggest_nearest(typed.partition("=")[0], options) if typed.startswith("-") else ""
            message = f"{typed} is not valid: {self.prog} takes {', '.join(options)}{nearest}"
        elif is_missing:
            message = f"{names} is missing: {self.prog} --help says what it is"
        self.exit(2, f"{escape_unprintable(message.removeprefix('argument ')).rstrip('.')}.\n")


def build_parser(name: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """The parser of the command `name`, whose help keeps the lines of `epilog` as they are."""
    program = Path(sys.argv[0]).name
    return SentenceParser(
        prog=f"{program} {name}".rstrip() if program == CONSOLE_SCRIPT else f"python -m bench.{name}".rstrip("."),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def report_usage_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Have a command print the sentence of a `UsageError`, and end with exit code 2."""

    @functools.wraps(main)
    def main_with_errors(*arguments: Any) -> int:
        try:
            return main(*arguments)
        except UsageError as error:
            print(error, file=sys.stderr)
            return 2

    return main_with_errors


def run_main(main: Callable[[], int]) -> int:
    """Run a command's `main`; Ctrl-C ends it in order, with no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end takes a moment, and a second Ctrl-C would be printed
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    finally:
        gc.freeze()  # what is left goes with the process: Python would look through all of it once more


# --- What commands print: text that users typed or rows brought along is shown as it is, and never as anything else.


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


# --- Paths as somebody typed them: such as can be opened and printed.

MIN_FREE_BYTES = 256 * 1024
"""Of the largest rows; a store with less space is refused."""


def require_path(field: str, text: str) -> Path:
    """A path, whether there is something or not.

    Raises
    ------
    UsageError
        If no file could be there: a name is too long, symbolic links lead in a circle.
    """
    try:
        os.stat(text)  # noqa: PTH116 (a path as text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:
        raise invalid_value_error(field, text, f"another path ({getattr(error, 'strerror', None) or error})") from None
    return Path(text)


def require_writable_store(store: Path) -> None:
    """Raise `UsageError` unless the store can take a row: its folder, and some disk space."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store) as file:
            os.posix_fallocate(file.fileno(), 0, MIN_FREE_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise invalid_value_error("store", store, f"a folder that can be written to ({reason})") from None


@contextlib.contextmanager
def refuse_unreadable_store(store: Path) -> Iterator[None]:
    """Around what looks into a store: raise `UsageError` where this account may not."""
    try:
        yield
    except PermissionError as error:
        reason = f"{error.strerror}: {error.filename}"
        raise invalid_value_error("store", store, f"a folder that can be read ({reason})") from None


def parse_path_argument(text: str) -> Path:
    """For argparse: an argument that is a path."""
    try:
        return require_path("path", text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def import_command(name: str) -> Any:
    """The module that ``python -m bench.NAME`` runs: a file, or the ``__main__`` of a package."""
    module = importlib.import_module(f"bench.{name}")
    return importlib.import_module(f"{module.__name__}.__main__") if hasattr(module, "__path__") else module
