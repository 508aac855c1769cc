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

from bench.core import processes
from bench.records.index import StoreIndex
from bench.records.schema import Record
from bench.records.store import ATTEMPT_FILE_PATTERN, RUN_ID_PATTERN, read_row

if TYPE_CHECKING:
    import pandas as pd

RowFile = os.DirEntry[str] | Path
RowT = TypeVar("RowT")


class UnreadableRecordWarning(UserWarning):
    """A file in a store is not a record (torn, foreign or of a later format) and was left out."""


@dataclass
class StoreContents:
    """Everything a store holds: the latest row of each run, and the files that could not be read."""

    records: list[Record] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Where each record lies, below what was read."""


def read_latest_attempts(path: str | Path) -> StoreContents:
    """Read the latest attempt of every run below `path`.

    `path` may be a store, a folder of stores, one run's folder or one row file. An unreadable file is listed and
    passed over; the attempt before it, if there is one, then counts as the latest.

    Raises
    ------
    FileNotFoundError
        If `path` does not exist.
    """
    return _read_contents(path, all_attempts=False)


def read_all_attempts(path: str | Path) -> StoreContents:
    """Read every attempt of every run below `path`, not only the latest: what was measured with earlier commits.

    Raises
    ------
    FileNotFoundError
        If `path` does not exist.
    """
    return _read_contents(path, all_attempts=True)


def _read_contents(path: str | Path, *, all_attempts: bool) -> StoreContents:
    root = Path(path)
    prefix = f"{root.parent if root.is_file() else root}/"
    rows, unreadable = _read_rows(
        root, lambda file: (read_row(file), os.fspath(file).removeprefix(prefix)), all_attempts=all_attempts
    )
    return StoreContents([record for record, _ in rows], unreadable, [file for _, file in rows])


def load(path: str | Path) -> pd.DataFrame:
    """One flat row per run (its latest attempt), typed as the schema says.

    Files that are no record are named in an `UnreadableRecordWarning` each and in ``frame.attrs["unreadable"]``. Rows
    of a large store are kept in an index, so that only new ones are parsed the next time.

    Raises
    ------
    FileNotFoundError
        If `path` does not exist.
    """
    index = StoreIndex(Path(path))
    numbers, unreadable = _read_rows(Path(path), index.find_row_number)
    for problem in unreadable:
        warnings.warn(f"left out: {problem}", UnreadableRecordWarning, stacklevel=2)
    frame = index.build_table(numbers)
    frame.attrs["unreadable"] = unreadable
    return frame


def _read_rows(
    path: Path, read_row: Callable[[RowFile], RowT], *, all_attempts: bool = False
) -> tuple[list[RowT], list[str]]:
    """The latest row of all_attempts run that can be read (or `all_attempts` row), and a sentence on each file that
    cannot."""
    rows: list[RowT] = []
    problems: list[str] = []
    with (
        processes.pause_garbage_collection()
    ):  # rows are trees without cycles, and thousands of them make it search them all again
        for files, foreign_files in _walk_folders(path):
            for file in files:
                try:
                    rows.append(read_row(file))
                    if not all_attempts:
                        break
                except FileNotFoundError:
                    continue  # deleted since its folder was listed
                except OSError as error:
                    problems.append(f"{format_path(file)}: {error.strerror}")
                except ValueError as error:
                    problems.append(f"{format_path(file)}: {error}")
            problems += [f"{format_path(file)}: not a file of this suite" for file in foreign_files]
    return rows, problems


def _walk_folders(path: Path) -> Iterator[tuple[Sequence[RowFile], list[str]]]:
    """Of every folder below `path`, sorted by name: its row files, latest first, and what else a run's has in it."""
    if path.is_file():
        yield [path], []
        return
    if not path.is_dir():
        raise FileNotFoundError(f"no such store: {path}")
    pending_folders = [os.fspath(path)]
    while pending_folders:
        folder = pending_folders.pop()
        folder_entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            folder_entries += entries
        subfolders = [
            entry.path for entry in folder_entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
        ]
        pending_folders += sorted(subfolders, reverse=True)
        files = [entry for entry in folder_entries if not _is_folder(entry)]
        row_files = {int(match[1]): file for file in files if (match := ATTEMPT_FILE_PATTERN.match(file.name))}
        is_run_folder = RUN_ID_PATTERN.match(os.path.basename(folder))
        foreign_files = sorted(file.path for file in files if is_run_folder and not _is_run_file(file.name))
        yield [row_files[attempt] for attempt in sorted(row_files, reverse=True)], foreign_files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def format_path(path: RowFile | str) -> str:
    """A path as a message shows it: file names are bytes, and need not be text."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _is_run_file(name: str) -> bool:
    return bool(
        ATTEMPT_FILE_PATTERN.match(name)
        or re.match(r"^\d+\.((node\d+\.)?log|trace\.json\.gz)$", name)
        or name.startswith(".")
    )
