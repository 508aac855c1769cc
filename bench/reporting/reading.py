"""Reading rows that somebody named: a sentence where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.errors import UsageError
from bench.records import StoreContents, read_latest_attempts
from bench.reporting.labels import format_plural


def read_store(
    path: str | Path, read_contents: Callable[[Path], StoreContents] = read_latest_attempts
) -> StoreContents:
    """The rows below `path`: the latest of every run, unless another way to read them is given.

    Raises
    ------
    UsageError
        If there is no such path or no row below it.
    """
    try:
        contents = read_contents(Path(path))
    except FileNotFoundError:
        raise UsageError(f"There is no store at {path}: choose a store, a folder of stores or a row file.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not contents.records:
        left_out_note = f" ({format_plural(len(contents.unreadable), 'file')} left out)" if contents.unreadable else ""
        raise UsageError(f"{path} holds no rows{left_out_note}: choose a store, a folder of stores or a row file.")
    return contents
