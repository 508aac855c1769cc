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
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.records import sharing
from bench.records.schema import COLUMN_NAMES, COLUMNS, FORMAT_VERSION
from bench.records.store import read
from bench.records.table import frame_of, pack, pack_texts, unpack, unpack_texts

if TYPE_CHECKING:
    import pandas as pd

FEW = 1_000
"""Rows that are read in a tenth of a second anyway: fewer are not indexed."""

STALE = 0.05
"""Share of its rows that may be new, changed or gone before an index is replaced."""

SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again without its times showing it, so its row is not indexed yet."""


class Index:
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
        self._known, self._files, self._stamps = _read_index(self._path)
        self._numbers = {file: number for number, file in enumerate(self._files)}
        self._new: list[list[Any]] = []

    def find(self, file: os.DirEntry[str] | Path) -> int:
        """Number of a file's row, which is read unless the index knows it as it is.

        Raises
        ------
        ValueError, OSError
            As `bench.records.read` does.
        """
        status = file.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        name = os.fspath(file).removeprefix(self._prefix)
        number = self._numbers.get(name)
        if number is None or self._stamps[number] != stamp:
            record = read(file)
            number = len(self._files)
            self._files.append(name)
            self._stamps.append(stamp)
            self._new.append([record.get(column) for column in COLUMN_NAMES])
        return number

    def table(self, numbers: list[int]) -> pd.DataFrame:
        """The table of some rows, in their order. Keeps it, where it is long and says much that the index does not."""
        import pandas as pd

        new = frame_of(zip(*self._new, strict=True) if self._new else [[] for _ in COLUMNS])
        rows = new if self._known is None else pd.concat([self._known, new]) if self._new else self._known
        num_known = len(self._files) - len(self._new)
        settled = [number for number in numbers if self._stamps[number][2] < self._opened_ns - SETTLED_NS]
        num_kept = sum(number < num_known for number in settled)
        num_changed = len(settled) + num_known - 2 * num_kept
        if len(settled) >= FEW and num_changed > STALE * len(settled):
            with contextlib.suppress(OSError):
                self._save(rows, settled)
        return rows.take(numbers).reset_index(drop=True)

    def _save(self, rows: pd.DataFrame, numbers: list[int]) -> None:
        files = pack_texts([self._files[number] for number in numbers])
        stamps = np.array([self._stamps[number] for number in numbers], dtype=np.int64)
        _write_arrays(self._path, {"files": files, "stamps": stamps, **pack(rows.take(numbers))})


def _header(body: bytes) -> bytes:
    """First line of an index: who writes the same knows this format and these columns, and wrote this body."""
    about = {
        "index": 2,
        "format": FORMAT_VERSION,
        "columns": {column.name: column.dtype for column in COLUMNS},
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(about).encode() + b"\n"


def _read_index(path: Path) -> tuple[pd.DataFrame | None, list[str], list[list[int]]]:
    """The table of an index, and file and stamp of each of its rows; nothing where it is none."""
    try:
        with path.open("rb") as file:
            header, body = file.readline(), file.read()
        if header != _header(body):
            return None, [], []
        with np.load(io.BytesIO(body), allow_pickle=False) as stored:
            arrays = dict(stored)
        known, files, stamps = unpack(arrays), unpack_texts(arrays["files"]), arrays["stamps"]
        if not len(known) == len(files) == len(stamps) or stamps.shape[1:] != (3,):
            return None, [], []
        return known, files, stamps.tolist()
    except Exception:  # whatever somebody else may have put there, it is only a cache
        return None, [], []


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    body = io.BytesIO()
    np.savez(body, **arrays)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".index-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            sharing.make_readable(file.fileno())
            file.write(_header(body.getvalue()))
            file.write(body.getvalue())
        Path(temporary).replace(path)
    except BaseException:
        os.unlink(temporary)
        raise
