"""Packing a store: the rows of many files become lines of one, and rows again.

Nothing that was measured is lost: a measured row that is packed stays, and rows that differ from packed ones of the
same attempt are refused. A prediction that says what a packed one says is that prediction: its line stays as it is,
whenever, wherever and by whatever commit it was made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.core import files
from bench.core.errors import UsageError, invalid_value_error
from bench.core.files import encode_line, encode_record, parse_json, read_json
from bench.records.checking import check_record
from bench.records.claims import list_claimed_runs
from bench.records.packed_rows import (
    RESERVED_FIELDS,
    ROWS_FILE,
    PackedHeader,
    PackedRows,
    encode_rows,
    open_packed_rows,
    read_packed_rows,
)
from bench.records.schema import PREDICTION_ORIGIN, Record
from bench.records.store import get_row_path, list_attempts, list_runs

LOCK_FILE = ".pack.lock"

REPLACE_OPTION = "--replace-predictions"

AttemptKey = tuple[str, int]
"""run_id and attempt."""


@dataclass
class PackResult:
    path: Path
    num_rows: int
    num_added: int
    """Rows that were not packed before, replaced predictions included."""
    num_removed: int
    """Predictions that were replaced or dropped."""
    unreadable: list[str] = field(default_factory=list)
    """A sentence on each file that is no row and was left where it is."""


def pack_store(store: Path, output: Path | None = None, *, replace_predictions: bool = False) -> PackResult:
    """Pack the rows of a store into one file.

    Parameters
    ----------
    output: Path, optional
        Folder of the file. If not given, the store itself: then the files whose rows were packed are removed, but for
        those of runs that are being executed.
    replace_predictions: bool
        Packed predictions that the store lacks are dropped, and those with other results replaced.

    Raises
    ------
    UsageError
        If there is nothing to pack, the packed file there is damaged, it has rows that the store lacks or whose values
        are others, or it cannot be written.
    """
    folder = store if output is None else output
    is_in_place = folder.resolve() == store.resolve()
    try:
        with contextlib.ExitStack() as stack:
            if is_in_place and store.is_dir():
                stack.enter_context(_lock_folder(folder))
            store_rows, unreadable = _read_store_rows(store)
            if not store_rows:
                raise UsageError(f"The store {store} holds no rows to pack.{_format_first(unreadable)}")
            if not is_in_place:
                files.make_folder(folder)
                stack.enter_context(_lock_folder(folder))
            packed_file = open_packed_rows(folder)
            packed_rows = _decode_rows(packed_file)
            rows = _combine_rows(packed_rows, store_rows, store, folder, replace_predictions=replace_predictions)
            num_kept = sum(rows.get(key) is row for key, row in packed_rows.items())
            _write_packed_rows(folder, rows, packed_file.header if 2 * num_kept >= len(rows) else None)
            if is_in_place:
                _remove_row_files(store, store_rows)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be read or written ({error.strerror or error}).") from None
    except RecursionError:
        raise UsageError(f"A row of {store} is nested too deeply to be packed.") from None
    return PackResult(
        folder / ROWS_FILE, len(rows), len(rows) - num_kept, len(packed_rows) - num_kept, unreadable=unreadable
    )


def unpack_store(store: Path, output: Path) -> tuple[int, list[str]]:
    """Write every row of a store, packed or not, to a file of its own.

    Returns
    -------
    int, list of str
        How many, and a sentence on each file or line that is no row.

    Raises
    ------
    UsageError
        If the store has no rows, the output has packed rows or other rows of the same attempts, or it cannot be
        written.
    """
    try:
        if (output / ROWS_FILE).exists():
            raise invalid_value_error("--output", output, f"a folder without {ROWS_FILE}")
        rows, unreadable = _read_store_rows(store)
        if not rows:
            raise UsageError(f"The store {store} holds no rows to unpack.{_format_first(unreadable)}")
        texts = {get_row_path(output, *key): encode_record(row) + "\n" for key, row in rows.items()}
        for path, text in texts.items():
            if path.exists() and not _is_row_of(path, text):
                raise invalid_value_error("--output", output, f"a folder that has no other row at {path}")
        for path, text in texts.items():
            files.make_folder(path.parent)
            _write_file(path, text)
    except OSError as error:
        raise UsageError(f"{error.filename or output} cannot be read or written ({error.strerror or error}).") from None
    return len(rows), unreadable


# ---- which rows


def _decode_rows(packed: PackedRows) -> dict[AttemptKey, Record]:
    """Rows of a packed file, all of which must be whole: what cannot be read could not be kept."""
    if packed.problems:
        raise UsageError(f"{packed.problems[0]}. Repair this file first, or choose another folder.")
    rows = {}
    for row in packed.list_rows():
        try:
            decoded_row = row.decode()
        except ValueError as error:
            raise UsageError(f"{row.location}: {error}. Repair this file first, or choose another folder.") from None
        rows[decoded_row["run_id"], decoded_row["attempt"]] = decoded_row
    return rows


def _read_store_rows(store: Path) -> tuple[dict[AttemptKey, Record], list[str]]:
    """Every row of a store as it was written, and a sentence on each file or line that is none."""
    if not store.is_dir():
        raise UsageError(f"STORE={store} is not valid: choose a folder that a sweep wrote to.")
    packed = open_packed_rows(store)
    rows: dict[AttemptKey, Record] = {}
    unreadable = list(packed.problems)
    for run_id in list_runs(store):
        for attempt in list_attempts(store, run_id):
            path = get_row_path(store, run_id, attempt)
            try:
                packed_row = packed.rows.get(run_id, {}).get(attempt)
                row = packed_row.decode() if packed_row is not None and not path.exists() else read_json(path)
                _check_packable(row, run_id, attempt)
                rows[run_id, attempt] = row
            except FileNotFoundError:
                unreadable.append(f"{path.parent}: attempt {attempt} is in a file of another name")
            except ValueError as error:
                unreadable.append(f"{path}: {error}")
    return rows, unreadable


def _check_packable(row: Any, run_id: str, attempt: int) -> None:
    record = check_record(parse_json(encode_record(row).encode()) if isinstance(row, dict) else row)
    if (record["run_id"], record["attempt"]) != (run_id, attempt):
        raise ValueError(f"it is the row of run {record['run_id']}, attempt {record['attempt']}")
    if reserved := [name for name in RESERVED_FIELDS if name in row]:
        raise ValueError(f"it has a column {reserved[0]}, which packed rows use otherwise")


def _combine_rows(
    packed_rows: dict[AttemptKey, Record],
    store_rows: dict[AttemptKey, Record],
    store: Path,
    folder: Path,
    *,
    replace_predictions: bool,
) -> dict[AttemptKey, Record]:
    """The rows that are packed afterwards; those that are packed already are the same objects.

    Predictions of a run are kept as they are packed if the latest ones say the same.

    Raises
    ------
    UsageError
        If a packed row would be lost, or replaced without being asked to.
    """
    rows = dict(packed_rows)
    packed_runs: dict[str, dict[int, Record]] = {}
    for (run_id, attempt), row in packed_rows.items():
        packed_runs.setdefault(run_id, {})[attempt] = row
    if folder.resolve() != store.resolve():
        for run_id in packed_runs.keys() - {run_id for run_id, _ in store_rows}:
            for attempt, row in packed_runs[run_id].items():
                _require_replaceable(row, store, folder, replace_predictions=replace_predictions)
                del rows[run_id, attempt]
    predictions: dict[str, dict[int, Record]] = {}
    for (run_id, attempt), row in store_rows.items():
        if _is_prediction(row):
            predictions.setdefault(run_id, {})[attempt] = row
        else:
            _add_row(rows, row, store, folder)
    for run_id, attempts in predictions.items():
        packed_attempts = {attempt: row for attempt, row in packed_runs.get(run_id, {}).items() if _is_prediction(row)}
        latest_row = attempts[max(attempts)]
        if packed_attempts and _has_same_results(latest_row, packed_attempts[max(packed_attempts)]):
            continue
        if replace_predictions:
            for attempt in packed_attempts:
                del rows[run_id, attempt]
            attempts = {latest_row["attempt"]: latest_row}
        for row in attempts.values():
            _add_row(rows, row, store, folder)
    return rows


def _add_row(rows: dict[AttemptKey, Record], row: Record, store: Path, folder: Path) -> None:
    """Add a row of the store to those of the folder, which may have the same one."""
    present_row = rows.setdefault((row["run_id"], row["attempt"]), row)
    if present_row is not row and _encode_sorted(present_row) != _encode_sorted(row):
        raise UsageError(
            f"Attempt {row['attempt']} of run {row['run_id']} is packed in {folder} with other values than {store} has:"
            " choose another folder" + (f", or replace it with {REPLACE_OPTION}." if _is_prediction(row) else ".")
        )


def _require_replaceable(row: Record, store: Path, folder: Path, *, replace_predictions: bool) -> None:
    """Raise `UsageError` unless a packed row that the store lacks may go."""
    if not _is_prediction(row):
        raise UsageError(
            f"{folder} has run {row['run_id']} packed, which {store} lacks, and what was measured stays: choose another"
            " folder."
        )
    if not replace_predictions:
        raise UsageError(
            f"{folder} has a prediction of run {row['run_id']} packed, which {store} lacks: choose another folder, or "
            f"drop it with {REPLACE_OPTION}."
        )


def _is_prediction(row: Record) -> bool:
    return row.get("evidence") == "predicted"


def _has_same_results(row: Record, other_row: Record) -> bool:
    """Whether two predictions of a run say the same."""
    results, other_results = (
        {name: value for name, value in some_row.items() if name not in PREDICTION_ORIGIN}
        for some_row in (row, other_row)
    )
    return _encode_sorted(results) == _encode_sorted(other_results)


def _encode_sorted(row: Record) -> str:
    return json.dumps(json.loads(encode_line(row)), sort_keys=True)


# ---- files


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's packed rows: whoever packs beside this waits, and then sees what was packed."""
    with files.open_lock(folder / LOCK_FILE) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_packed_rows(folder: Path, rows: dict[AttemptKey, Record], header: PackedHeader | None) -> None:
    """Replace the packed file of a folder as a whole, once every row was read back from the new one as it is."""
    sorted_rows = [rows[key] for key in sorted(rows)]
    text = "".join(f"{line}\n" for line in encode_rows(sorted_rows, header))
    path = folder / ROWS_FILE
    if path.is_file() and path.read_bytes() == text.encode():
        return
    _write_file(path, text, check=lambda temporary_path: _verify_rows(temporary_path, sorted_rows))


def _verify_rows(path: str, sorted_rows: Sequence[Record]) -> None:
    packed = read_packed_rows(path)
    decoded_rows = [row.decode() for row in packed.list_rows()]
    if packed.problems or [*map(encode_record, decoded_rows)] != [*map(encode_record, sorted_rows)]:
        raise AssertionError(f"rows are not read back as they were packed: {packed.problems[:1]}")


def _is_row_of(path: Path, text: str) -> bool:
    """Whether a file holds the row of a text, wherever its lines end: earlier versions broke them elsewhere."""
    try:
        return encode_record(read_json(path)) + "\n" == text
    except ValueError:
        return False


def _write_file(path: Path, text: str, check: Callable[[str], None] = lambda temporary_path: None) -> None:
    """Write a file, whole and durably or not at all: not if the check of the temporary one raises an error."""
    descriptor, temporary_path = tempfile.mkstemp(dir=path.parent, prefix=".rows-")
    try:
        with os.fdopen(descriptor, "w") as file:
            files.make_readable(file.fileno())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        check(temporary_path)
        Path(temporary_path).replace(path)
    except BaseException:
        os.unlink(temporary_path)
        raise
    files.sync_folder(path.parent)


def _remove_row_files(store: Path, packed_keys: Iterable[AttemptKey]) -> None:
    """Remove the files of rows that are packed, and folders that are empty then: logs and traces stay."""
    claimed_runs = set(list_claimed_runs(store))
    for run_id, attempt in packed_keys:
        if run_id in claimed_runs:
            continue
        path = get_row_path(store, run_id, attempt)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    with contextlib.suppress(FileNotFoundError):
        (store / ".index").unlink()  # of files that are gone


def _format_first(problems: Sequence[str]) -> str:
    return f" {problems[0]}" if problems else ""
