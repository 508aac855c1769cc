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
from bench.records.packed_rows import ROWS_FILE, PackedRow, PackedRows, find_packed_attempts, open_packed_rows
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
        processes.pause_garbage_collection()
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
    pending_folders: list[tuple[str, PackedRows | None]] = [(os.fspath(path), None)]
    while pending_folders:
        folder, store_rows = pending_folders.pop()
        folder_entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            folder_entries += entries
        subfolders = {
            entry.path for entry in folder_entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
        }
        files = [entry for entry in folder_entries if not _is_folder(entry)]
        sources: dict[int, RowSource] = {}
        problems: list[str] = []
        packed_rows: PackedRows | None = None
        store, folder_name = os.path.split(folder)
        if RUN_ID_PATTERN.match(folder_name):
            sources |= _find_packed_sources(store, folder_name, store_rows)
            foreign_files = sorted(file.path for file in files if not _is_run_file(file.name))
            problems += [f"{format_path(file)}: not a file of this suite" for file in foreign_files]
        else:
            try:
                packed_rows = open_packed_rows(folder, reads_all=True)
            except PermissionError as error:
                problems.append(f"{format_path(str(error.filename))}: {error.strerror}")
            else:
                problems += map(format_path, packed_rows.problems)
                subfolders |= {os.path.join(folder, run_id) for run_id in packed_rows.readable_rows}  # noqa: PTH118
        pending_folders += [(subfolder, packed_rows) for subfolder in sorted(subfolders, reverse=True)]
        sources |= {int(match[1]): file for file in files if (match := ATTEMPT_FILE_PATTERN.match(file.name))}
        yield [sources[attempt] for attempt in sorted(sources, reverse=True)], problems


def _find_packed_sources(store: str, run_id: str, store_rows: PackedRows | None) -> dict[int, PackedRow]:
    """The packed rows of a run whose folder has just been listed.

    Packing replaces the packed file before it deletes row files: whatever the list lacks is in the file as it is now.

    Parameters
    ----------
    store_rows: PackedRows, optional
        Those of the store as they were read before.
    """
    with contextlib.suppress(PermissionError):  # which is said of the store
        if store_rows is None or not store_rows.is_current():
            store_rows = open_packed_rows(store)
        return store_rows.readable_rows.get(run_id, {})
    return {}


def _walk_packed_runs(store: Path) -> Iterator[tuple[Sequence[RowSource], list[str]]]:
    """The packed rows of a store alone."""
    packed_rows = open_packed_rows(store, reads_all=True)
    yield [], packed_rows.problems
    for _, attempts in sorted(packed_rows.readable_rows.items()):
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
