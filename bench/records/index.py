"""The index of a store: the table of its rows as they were read last, so that only new rows have to be parsed.

    <store>/.index        one line that says what it is, then numpy's .npz

Only a cache. A row of it counts for as long as its file has the size and the times it had when it was read; an index
that is damaged, foreign or of another format counts for nothing. It is replaced as a whole, so any number of processes
may read and write it at once; where it cannot be written there is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.records import sharing
from bench.records.packed_rows import PackedRow
from bench.records.schema import COLUMN_NAMES, COLUMNS, FORMAT_VERSION, Record
from bench.records.store import read_row
from bench.records.table import build_frame, pack_frame, pack_texts, unpack_frame, unpack_texts

if TYPE_CHECKING:
    import pandas as pd

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
            sharing.make_readable(file.fileno())
            file.write(_build_header(body.getvalue()))
            file.write(body.getvalue())
        Path(temporary_path).replace(path)
    except BaseException:
        os.unlink(temporary_path)
        raise
