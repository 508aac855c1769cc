"""Reading whole stores: every run's latest row, or all of them as one table."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bench import collector
from bench.records.index import Index
from bench.records.schema import Record
from bench.records.store import ATTEMPT_FILE, RUN_ID, read

if TYPE_CHECKING:
    import pandas as pd

RowFile = os.DirEntry[str] | Path
Row = TypeVar("Row")


class UnreadableRecordWarning(UserWarning):
    """A file in a store is not a record (torn, foreign or of a later format) and was left out."""


@dataclass
class Contents:
    """Everything a store holds: the latest row of each run, and the files that could not be read."""

    records: list[Record] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Where each record lies, below what was read."""


def read_all(path: str | Path) -> Contents:
    """Read the latest attempt of every run below `path`.

    `path` may be a store, a folder of stores, one run's folder or one row file. An unreadable file is listed and
    passed over; the attempt before it, if there is one, then counts as the latest.

    Raises
    ------
    FileNotFoundError
        If `path` does not exist.
    """
    return _contents(path, every=False)


def read_attempts(path: str | Path) -> Contents:
    """Read every attempt of every run below `path`, not only the latest: what was measured with earlier commits.

    Raises
    ------
    FileNotFoundError
        If `path` does not exist.
    """
    return _contents(path, every=True)


def _contents(path: str | Path, *, every: bool) -> Contents:
    root = Path(path)
    prefix = f"{root.parent if root.is_file() else root}/"
    rows, unreadable = _read_rows(root, lambda file: (read(file), os.fspath(file).removeprefix(prefix)), every=every)
    return Contents([record for record, _ in rows], unreadable, [file for _, file in rows])


def load(path: str | Path) -> pd.DataFrame:
    """One flat row per run (its latest attempt), typed as the schema says.

    Files that are no record are named in an `UnreadableRecordWarning` each and in ``frame.attrs["unreadable"]``. Rows
    of a large store are kept in an index, so that only new ones are parsed the next time.

    Raises
    ------
    FileNotFoundError
        If `path` does not exist.
    """
    index = Index(Path(path))
    numbers, unreadable = _read_rows(Path(path), index.find)
    for problem in unreadable:
        warnings.warn(f"left out: {problem}", UnreadableRecordWarning, stacklevel=2)
    frame = index.table(numbers)
    frame.attrs["unreadable"] = unreadable
    return frame


def _read_rows(path: Path, read_row: Callable[[RowFile], Row], *, every: bool = False) -> tuple[list[Row], list[str]]:
    """The latest row of every run that can be read (or `every` row), and a sentence on each file that cannot."""
    rows: list[Row] = []
    problems: list[str] = []
    with collector.at_rest():  # rows are trees without cycles, and thousands of them make it search them all again
        for files, strangers in _folders(path):
            for file in files:
                try:
                    rows.append(read_row(file))
                    if not every:
                        break
                except FileNotFoundError:
                    continue  # deleted since its folder was listed
                except OSError as error:
                    problems.append(f"{printable(file)}: {error.strerror}")
                except ValueError as error:
                    problems.append(f"{printable(file)}: {error}")
            problems += [f"{printable(file)}: not a file of this suite" for file in strangers]
    return rows, problems


def _folders(path: Path) -> Iterator[tuple[Sequence[RowFile], list[str]]]:
    """Of every folder below `path`, sorted by name: its row files, latest first, and what else a run's has in it."""
    if path.is_file():
        yield [path], []
        return
    if not path.is_dir():
        raise FileNotFoundError(f"no such store: {path}")
    waiting = [os.fspath(path)]
    while waiting:
        folder = waiting.pop()
        found: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            found += entries
        below = [entry.path for entry in found if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."]
        waiting += sorted(below, reverse=True)
        files = [entry for entry in found if not _is_folder(entry)]
        rows = {int(match[1]): file for file in files if (match := ATTEMPT_FILE.match(file.name))}
        of_a_run = RUN_ID.match(os.path.basename(folder))
        strangers = sorted(file.path for file in files if of_a_run and not _belongs(file.name))
        yield [rows[attempt] for attempt in sorted(rows, reverse=True)], strangers


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def printable(path: RowFile | str) -> str:
    """A path as a message shows it: file names are bytes, and need not be text."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _belongs(name: str) -> bool:
    return bool(
        ATTEMPT_FILE.match(name) or re.match(r"^\d+\.((node\d+\.)?log|trace\.json\.gz)$", name) or name.startswith(".")
    )
