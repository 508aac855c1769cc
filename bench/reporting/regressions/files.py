"""Reading what is compared, and writing what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.errors import UsageError
from bench.records import Contents, read_all
from bench.records.store import ATTEMPT_FILE, RUN_ID
from bench.reporting.labels import counted


def rows_of(path: Path, read: Callable[[Path], Contents] = read_all) -> Contents:
    """The rows below `path`.

    Raises
    ------
    UsageError
        If there is no such path or no row below it.
    """
    try:
        contents = read(path)
    except FileNotFoundError:
        raise UsageError(f"There is no store at {path}: choose a store, a folder of stores or a row file.") from None
    if not contents.records:
        left_out = f" ({counted(len(contents.unreadable), 'file')} left out)" if contents.unreadable else ""
        raise UsageError(f"{path} holds no rows{left_out}: choose a store, a folder of stores or a row file.")
    return contents


def write_all(texts: dict[Path, str]) -> None:
    """Write texts to files; folders are made.

    Raises
    ------
    UsageError
        If a file would replace a row, or cannot be written.
    """
    for path in texts:
        if ATTEMPT_FILE.match(path.name) and RUN_ID.match(path.absolute().parent.name):
            raise UsageError(f"{path} is not valid: choose a file that is not the row of a run.")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}): choose another file.") from None
