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

from bench.core.errors import UsageError, invalid_value_error
from bench.records import sharing
from bench.records.checking import RUN_ID_PATTERN, check_record
from bench.records.claims import list_claimed_runs
from bench.records.encoding import encode_line, encode_record, parse_json, read_json
from bench.records.packed_rows import (
    KEY_ORDER,
    PACKED_FORMAT,
    PACKED_FORMAT_VERSION,
    ROWS_FILE,
    KeyOrder,
    PackedHeader,
    PackedRows,
    join_path,
    open_packed_rows,
    read_packed_rows,
)
from bench.records.schema import PREDICTION_ORIGIN, Record, upgrade_record
from bench.records.store import get_row_path, list_attempts

LOCK_FILE = ".pack.lock"

UNSHARED_COLUMNS = ("attempt", "run_id")
"""Columns that every line has, so that it says which row it is whatever became of the first one."""

REPLACE_OPTION = "--replace-predictions"

AttemptKey = tuple[str, int]
"""run_id and attempt."""


@dataclass
class PackResult:
    """What packing came to."""

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
                sharing.make_folder(folder)
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
            if path.exists() and path.read_text() != text:
                raise invalid_value_error("--output", output, f"a folder that has no other row at {path}")
        for path, text in texts.items():
            sharing.make_folder(path.parent)
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
    run_ids = {name for name in os.listdir(store) if RUN_ID_PATTERN.match(name)} | packed.rows.keys()
    for run_id in sorted(run_ids):
        for attempt in list_attempts(store, run_id):
            path = get_row_path(store, run_id, attempt)
            try:
                try:
                    row = read_json(path)
                except (FileNotFoundError, NotADirectoryError):
                    row = packed.rows[run_id][attempt].decode()
                _check_packable(row, run_id, attempt)
                rows[run_id, attempt] = row
            except ValueError as error:
                unreadable.append(f"{path}: {error}")
    return rows, unreadable


def _check_packable(row: Any, run_id: str, attempt: int) -> None:
    record = check_record(upgrade_record(parse_json(encode_record(row).encode()) if isinstance(row, dict) else row))
    if (record["run_id"], record["attempt"]) != (run_id, attempt):
        raise ValueError(f"it is the row of run {record['run_id']}, attempt {record['attempt']}")
    if KEY_ORDER in row:
        raise ValueError(f"it has a column {KEY_ORDER}, which packed rows use otherwise")


def _combine_rows(
    packed_rows: dict[AttemptKey, Record],
    store_rows: dict[AttemptKey, Record],
    store: Path,
    folder: Path,
    *,
    replace_predictions: bool,
) -> dict[AttemptKey, Record]:
    """The rows that are packed afterwards; those that are packed already are the same objects."""
    rows = dict(packed_rows)
    packed_runs: dict[str, dict[int, Record]] = {}
    for (run_id, attempt), row in packed_rows.items():
        packed_runs.setdefault(run_id, {})[attempt] = row
    if folder.resolve() != store.resolve():
        for run_id in packed_runs.keys() - {run_id for run_id, _ in store_rows}:
            for attempt, row in packed_runs[run_id].items():
                _require_replaceable(row, store, folder, replace_predictions=replace_predictions)
                del rows[run_id, attempt]
    for (run_id, attempt), row in store_rows.items():
        packed_attempts = packed_runs.get(run_id, {})
        if row["evidence"] == "predicted":
            if any(_has_same_results(row, packed_row) for packed_row in packed_attempts.values()):
                continue
            if replace_predictions:
                for packed_attempt, packed_row in packed_attempts.items():
                    if _is_prediction(packed_row) and rows.get((run_id, packed_attempt)) is packed_row:
                        del rows[run_id, packed_attempt]
        present_row = rows.setdefault((run_id, attempt), row)
        if present_row is not row and _encode_sorted(present_row) != _encode_sorted(row):
            raise UsageError(
                f"Attempt {attempt} of run {run_id} is packed in {folder} with other values than {store} has: choose "
                "another folder" + (f", or replace it with {REPLACE_OPTION}." if _is_prediction(present_row) else ".")
            )
    return rows


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


# ---- as lines


def encode_rows(rows: Sequence[Record], header: PackedHeader | None = None) -> Iterator[str]:
    """The lines of some rows, the first line before them.

    Parameters
    ----------
    rows: sequence of Record
        As they were written, by run_id and attempt.
    header: PackedHeader, optional
        Of these rows' file so far: what it shares stays shared where every row has such a value, if another one, so
        that lines of rows that are in the file already stay as they are.
    """
    sections = [{name: value for name, value in row.items() if name not in UNSHARED_COLUMNS} for row in rows]
    shared = _collect_shared(sections) if header is None else _keep_shared(header.shared, sections)
    key_order = {} if header is None else {path: list(keys) for path, keys in header.key_order.items()}
    for row in rows:
        _add_key_order(row, "", key_order)
    yield encode_line(
        {
            "format": PACKED_FORMAT,
            "format_version": PACKED_FORMAT_VERSION,
            KEY_ORDER: dict(sorted(key_order.items())),
            "shared": _sort_keys(shared),
        }
    )
    for row in rows:
        line = _drop_shared(row, shared)
        other_order: KeyOrder = {}
        _find_other_order(row, "", key_order, other_order)
        yield encode_line(_sort_keys({**line, KEY_ORDER: other_order}) if other_order else line)


def _collect_shared(sections: Sequence[Record]) -> Record:
    """Values that all sections have."""
    shared: Record = {}
    first_section, *other_sections = sections
    for key, value in first_section.items():
        if not all(key in section for section in other_sections):
            continue
        values = [value, *(section[key] for section in other_sections)]
        if all(isinstance(inner, dict) for inner in values):
            inner_shared = _collect_shared(values)
            if inner_shared or not any(values):
                shared[key] = inner_shared
        elif all(_is_same(value, other) for other in values):
            shared[key] = value
    return shared


def _keep_shared(shared: Record, sections: Sequence[Record]) -> Record:
    """What of shared values every section has, if with another value: a line can give one, but not take a key away."""
    kept: Record = {}
    for key, value in shared.items():
        if not all(key in section for section in sections):
            continue
        if not isinstance(value, dict):
            kept[key] = value
        elif all(isinstance(section[key], dict) for section in sections):
            inner_shared = _keep_shared(value, [section[key] for section in sections])
            if inner_shared or not value:
                kept[key] = inner_shared
    return kept


def _drop_shared(section: Record, shared: Record) -> Record:
    """A section, keys sorted, without values that it shares."""
    remaining: Record = {}
    for key, value in sorted(section.items()):
        if key not in shared:
            remaining[key] = _sort_keys(value)
        elif isinstance(value, dict) and isinstance(shared[key], dict):
            if inner_remaining := _drop_shared(value, shared[key]):
                remaining[key] = inner_remaining
        elif not _is_same(value, shared[key]):
            remaining[key] = _sort_keys(value)
    return remaining


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are one in JSON: 1, 1.0 and true are three."""
    if value.__class__ is not other.__class__:
        return False
    return encode_line(value) == encode_line(other) if isinstance(value, float | list | dict) else bool(value == other)


def _sort_keys(value: Any) -> Any:
    """Sections with their keys sorted. Lists are values, and stay as they are."""
    return {key: _sort_keys(inner) for key, inner in sorted(value.items())} if isinstance(value, dict) else value


def _add_key_order(section: Record, path: str, key_order: KeyOrder) -> None:
    """Put the keys of a section that are new where it has them: behind the key before."""
    keys = key_order.setdefault(path, [])
    known_keys = set(keys)
    position = 0
    for key, value in section.items():
        if key in known_keys:
            position = keys.index(key) + 1
        else:
            keys.insert(position, key)
            known_keys.add(key)
            position += 1
        if isinstance(value, dict):
            _add_key_order(value, join_path(path, key), key_order)


def _find_other_order(section: Record, path: str, key_order: KeyOrder, other_order: KeyOrder) -> None:
    """Add the keys of parts of a section that are in another order than in `key_order`."""
    if [key for key in key_order[path] if key in section] != list(section):
        other_order[path] = list(section)
    for key, value in section.items():
        if isinstance(value, dict):
            _find_other_order(value, join_path(path, key), key_order, other_order)


# ---- files


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's packed rows: whoever packs beside this waits, and then sees what was packed."""
    with sharing.open_lock(folder / LOCK_FILE) as file:
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


def _write_file(path: Path, text: str, check: Callable[[str], None] = lambda temporary_path: None) -> None:
    """Write a file, whole and durably or not at all: not if the check of the temporary one raises an error."""
    descriptor, temporary_path = tempfile.mkstemp(dir=path.parent, prefix=".rows-")
    try:
        with os.fdopen(descriptor, "w") as file:
            sharing.make_readable(file.fileno())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        check(temporary_path)
        Path(temporary_path).replace(path)
    except BaseException:
        os.unlink(temporary_path)
        raise
    folder_descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


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
