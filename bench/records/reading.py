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

from bench.core import garbage_collection
from bench.records.index import StoreIndex
from bench.records.packed_rows import ROWS_FILE, PackedRow, find_packed_attempts, open_packed_rows
from bench.records.schema import Record
from bench.records.store import ATTEMPT_FILE_PATTERN, RUN_ID_PATTERN, find_packed_row, read_row

if TYPE_CHECKING:
    import pandas as pd

RowSource = os.DirEntry[str] | Path | PackedRow
RowT = TypeVar("RowT")


class UnreadableRecordWarning(UserWarning):
    """A file in a store is not a record (torn, foreign or of a later format) and was left out."""


@dataclass
class StoreContents:
    """Everything a store holds: the latest row of each run, and the files that could not be read."""

    records: list[Record] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Where each record lies, below what was read: a file, or a file and a line."""


def read_latest_attempts(path: str | Path) -> StoreContents:
    """Read the latest attempt of every run below `path`.

    `path` may be a store, a folder of stores, one run's folder, one row file or a file of packed rows. An unreadable
    file or line is listed and passed over; the attempt before it, if there is one, then counts as the latest.

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
        root,
        lambda source: (_read_source(source), _get_location(source).removeprefix(prefix)),
        all_attempts=all_attempts,
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
    path: Path, read_source: Callable[[RowSource], RowT], *, all_attempts: bool = False
) -> tuple[list[RowT], list[str]]:
    """The latest row of every run that can be read (or every row), and a sentence on each file or line that cannot."""
    rows: list[RowT] = []
    problems: list[str] = []
    with (
        garbage_collection.pause_garbage_collection()
    ):  # rows are trees without cycles, and thousands of them make it search them all again
        for sources, folder_problems in _walk_folders(path):
            for source in sources:
                try:
                    rows.append(read_source(source))
                    if not all_attempts:
                        break
                except FileNotFoundError:
                    continue  # deleted since its folder was listed
                except OSError as error:
                    problems.append(f"{format_path(_get_location(source))}: {error.strerror}")
                except ValueError as error:
                    problems.append(f"{format_path(_get_location(source))}: {error}")
            problems += folder_problems
    return rows, problems


def _read_source(source: RowSource) -> Record:
    return source.read() if isinstance(source, PackedRow) else read_row(source)


def _get_location(source: RowSource) -> str:
    return source.location if isinstance(source, PackedRow) else os.fspath(source)


def _walk_folders(path: Path) -> Iterator[tuple[Sequence[RowSource], list[str]]]:
    """Of every folder below `path`, sorted by name: its rows, latest attempt first, and sentences on what is no row.

    Packed rows are given where their run's folder would be, were they not packed.
    """
    if path.is_file():
        if path.name == ROWS_FILE:
            yield from _walk_packed_runs(path.parent)
        else:
            yield [path], []
        return
    if not path.is_dir() and not find_packed_attempts(path.parent, path.name):
        if find_packed_row(path) is None:
            raise FileNotFoundError(f"no such store: {path}")
        yield [path], []
        return
    pending_folders = [os.fspath(path)]
    while pending_folders:
        folder = pending_folders.pop()
        folder_entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            folder_entries += entries
        subfolders = {
            entry.path for entry in folder_entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
        }
        files = [entry for entry in folder_entries if not _is_folder(entry)]
        sources: dict[int, RowSource] = {}
        problems = []
        store, folder_name = os.path.split(folder)
        if RUN_ID_PATTERN.match(folder_name):
            with contextlib.suppress(PermissionError):  # said of the store
                sources |= find_packed_attempts(
                    store, folder_name
                )  # after its files were listed, as packing deletes them
            foreign_files = sorted(file.path for file in files if not _is_run_file(file.name))
            problems += [f"{format_path(file)}: not a file of this suite" for file in foreign_files]
        else:
            try:
                packed_rows = open_packed_rows(folder)
                problems += map(format_path, packed_rows.problems)
                if packed_rows.header is not None:
                    subfolders |= {f"{folder}/{run_id}" for run_id in packed_rows.rows}
            except PermissionError as error:
                problems.append(f"{format_path(str(error.filename))}: {error.strerror}")
        pending_folders += sorted(subfolders, reverse=True)
        sources |= {int(match[1]): file for file in files if (match := ATTEMPT_FILE_PATTERN.match(file.name))}
        yield [sources[attempt] for attempt in sorted(sources, reverse=True)], problems


def _find_readable_attempts(store: str, run_id: str) -> dict[int, PackedRow]:
    """The packed rows of a run; what is wrong with their file is said of its store."""
    with contextlib.suppress(PermissionError):
        packed_rows = open_packed_rows(store)
        if packed_rows.header is not None:
            return packed_rows.rows.get(run_id, {})
    return {}


def _walk_packed_runs(store: Path) -> Iterator[tuple[Sequence[RowSource], list[str]]]:
    """The packed rows of a store alone."""
    packed_rows = open_packed_rows(store)
    yield [], packed_rows.problems
    if packed_rows.header is not None:
        for _, attempts in sorted(packed_rows.rows.items()):
            yield [attempts[attempt] for attempt in sorted(attempts, reverse=True)], []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def format_path(path: str | os.PathLike[str]) -> str:
    """A path as a message shows it: file names are bytes, and need not be text."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _is_run_file(name: str) -> bool:
    return bool(
        ATTEMPT_FILE_PATTERN.match(name)
        or re.match(r"^\d+\.((node\d+\.)?log|trace\.json\.gz)$", name)
        or name.startswith(".")
    )
