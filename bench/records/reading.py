"""Reading whole stores: every run's latest row, or all of them as one table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.records.schema import COLUMNS, Record

if TYPE_CHECKING:
    import pandas as pd
import contextlib
import hashlib
import io
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bench.core import processes
from bench.core.files import make_readable
from bench.records.packed_rows import ROWS_FILE, PackedRow, PackedRows, find_packed_attempts, open_packed_rows
from bench.records.schema import COLUMN_NAMES, FORMAT_VERSION
from bench.records.store import ATTEMPT_FILE_PATTERN, RUN_ID_PATTERN, find_packed_row, read_row

# pandas is imported where it is needed: a run writes its row without it.


def to_frame(records: list[Record]) -> pd.DataFrame:
    """Records as one typed table, a row per record, columns as in the schema."""
    return build_frame([record.get(column.name) for record in records] for column in COLUMNS)


def build_frame(columns: Iterable[Any]) -> pd.DataFrame:
    """A table from the values of each column, in the schema's order."""
    import pandas as pd

    return pd.DataFrame(
        {column.name: _build_array(values, column.dtype) for column, values in zip(COLUMNS, columns, strict=True)}
    )


def _build_array(values: Any, dtype: str) -> Any:
    """A column's values with None for missing. NaN is a value: `pd.array` would take it for missing."""
    import pandas as pd

    if dtype == "Float64" and not isinstance(values, pd.api.extensions.ExtensionArray):
        values = list(values)
        missing_mask = np.array([value is None or value is pd.NA for value in values], dtype=bool)
        numbers = np.array(
            [0.0 if is_missing else value for is_missing, value in zip(missing_mask, values, strict=True)], dtype=float
        )
        return pd.arrays.FloatingArray(numbers, missing_mask)
    return pd.array(values, dtype=dtype)  # type: ignore[call-overload]


def pack_frame(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """A table as arrays without Python objects: reading them back from a file executes nothing."""
    import pandas as pd

    arrays: dict[str, np.ndarray] = {}
    for column in COLUMNS:
        values = frame[column.name]
        if column.dtype == "string":
            codes, texts = pd.factorize(values)
            arrays[column.name] = codes.astype(np.int32)
            arrays[f"{column.name}.texts"] = pack_texts(list(texts))
        else:
            arrays[column.name] = values.to_numpy(column.dtype.lower().replace("boolean", "bool"), na_value=0)
            arrays[f"{column.name}.missing"] = values.isna().to_numpy()
    return arrays


def unpack_frame(arrays: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """The table that `pack_frame` was given."""
    import pandas as pd

    columns = []
    for column in COLUMNS:
        values: Any = arrays[column.name]
        if column.dtype == "string":
            texts = np.array([*unpack_texts(arrays[f"{column.name}.texts"]), None], dtype=object)
            values = texts[values]  # code -1, for missing, is the last
        else:
            values = _build_array(values, column.dtype)
            values[arrays[f"{column.name}.missing"]] = pd.NA
        columns.append(values)
    return build_frame(columns)


def pack_texts(texts: list[str]) -> np.ndarray:
    """Texts of any length as an array of bytes."""
    return np.frombuffer(json.dumps(texts).encode(), np.uint8)


def unpack_texts(array: np.ndarray) -> list[str]:
    """The texts that `pack_texts` was given."""
    texts: list[str] = json.loads(array.tobytes())
    return texts


# --- The index of a store: the table of its rows as they were read last, so that only new rows have to be parsed.

MIN_INDEXED_ROWS = 1_000
"""Rows that are read in a tenth of a second anyway: fewer are not indexed."""

MAX_STALE_SHARE = 0.05
"""Share of its rows that may be new, changed or gone before an index is replaced."""

MIN_FILE_AGE_NS = 2_000_000_000
"""A file changed less than this ago may change again without its times showing it, so its row is not indexed yet."""

NEVER_SETTLED = (0, 0, sys.maxsize)
"""Size and times of what is not indexed."""


class StoreIndex:
    """The rows below a folder, numbered: first those the index knows, then those read since.

    Parameters
    ----------
    folder: Path
        What is read. The index lies in it and knows files by their path below it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".index"
        self._prefix = f"{folder}/"
        self._opened_ns = time.time_ns()
        self._cached_rows, self._files, self._file_stamps = _read_index(self._path)
        self._row_numbers = {file: number for number, file in enumerate(self._files)}
        self._new_rows: list[list[Any]] = []

    def find_row_number(self, file: os.DirEntry[str] | Path | PackedRow) -> int:
        """Number of a file's row, which is read unless the index knows it as it is. Packed rows are not indexed.

        Raises
        ------
        ValueError, OSError
            As `bench.records.read_row` does.
        """
        if isinstance(file, PackedRow):
            return self._add_row(file.read())
        try:
            file_status = file.stat()
        except FileNotFoundError:
            return self._add_row(read_row(file))  # it may have been packed since its folder was listed
        file_stamp = [file_status.st_size, file_status.st_mtime_ns, file_status.st_ctime_ns]
        name = os.fspath(file).removeprefix(self._prefix)
        number = self._row_numbers.get(name)
        if number is None or self._file_stamps[number] != file_stamp:
            number = self._add_row(read_row(file), name, file_stamp)
        return number

    def _add_row(self, record: Record, name: str = "", file_stamp: Sequence[int] = NEVER_SETTLED) -> int:
        self._files.append(name)
        self._file_stamps.append(list(file_stamp))
        self._new_rows.append([record.get(column) for column in COLUMN_NAMES])
        return len(self._files) - 1

    def build_table(self, numbers: list[int]) -> pd.DataFrame:
        """The table of some rows, in their order. Keeps it, where it is long and says much that the index does not."""
        import pandas as pd

        new_rows = build_frame(zip(*self._new_rows, strict=True) if self._new_rows else [[] for _ in COLUMNS])
        rows = (
            new_rows
            if self._cached_rows is None
            else pd.concat([self._cached_rows, new_rows])
            if self._new_rows
            else self._cached_rows
        )
        num_known = len(self._files) - len(self._new_rows)
        settled_numbers = [
            number for number in numbers if self._file_stamps[number][2] < self._opened_ns - MIN_FILE_AGE_NS
        ]
        num_kept = sum(number < num_known for number in settled_numbers)
        num_changed = len(settled_numbers) + num_known - 2 * num_kept
        if len(settled_numbers) >= MIN_INDEXED_ROWS and num_changed > MAX_STALE_SHARE * len(settled_numbers):
            with contextlib.suppress(OSError):
                self._save_index(rows, settled_numbers)
        return rows.take(numbers).reset_index(drop=True)

    def _save_index(self, rows: pd.DataFrame, numbers: list[int]) -> None:
        files = pack_texts([self._files[number] for number in numbers])
        stamps = np.array([self._file_stamps[number] for number in numbers], dtype=np.int64)
        _write_index(self._path, {"files": files, "stamps": stamps, **pack_frame(rows.take(numbers))})


def _build_header(body: bytes) -> bytes:
    """First line of an index: who writes the same knows this format and these columns, and wrote this body."""
    metadata = {
        "index": 2,
        "format": FORMAT_VERSION,
        "columns": {column.name: column.dtype for column in COLUMNS},
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(metadata).encode() + b"\n"


def _read_index(path: Path) -> tuple[pd.DataFrame | None, list[str], list[list[int]]]:
    """The table of an index, and file and stamp of each of its rows; nothing where it is none."""
    try:
        with path.open("rb") as file:
            header, body = file.readline(), file.read()
        if header != _build_header(body):
            return None, [], []
        with np.load(io.BytesIO(body), allow_pickle=False) as archive:
            arrays = dict(archive)
        cached_rows, files, file_stamps = unpack_frame(arrays), unpack_texts(arrays["files"]), arrays["stamps"]
        if not len(cached_rows) == len(files) == len(file_stamps) or file_stamps.shape[1:] != (3,):
            return None, [], []
        return cached_rows, files, file_stamps.tolist()
    except Exception:  # whatever somebody else may have put there, it is only a cache
        return None, [], []


def _write_index(path: Path, arrays: Mapping[str, Any]) -> None:
    body = io.BytesIO()
    np.savez(body, **arrays)
    descriptor, temporary_path = tempfile.mkstemp(dir=path.parent, prefix=".index-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            make_readable(file.fileno())
            file.write(_build_header(body.getvalue()))
            file.write(body.getvalue())
        Path(temporary_path).replace(path)
    except BaseException:
        os.unlink(temporary_path)
        raise


# --- Reading whole stores: every run's latest row, or all of them as one table.

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
