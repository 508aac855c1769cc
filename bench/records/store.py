"""The store: one folder per run, one file per attempt, nothing ever overwritten.

    <store>/rows.jsonl                    rows that were packed (`bench.records.packing`); new ones are files beside it
    <store>/<run_id>/<attempt>.json       the row
    <store>/<run_id>/<attempt>.log        what the ranks printed
    <store>/<run_id>/<attempt>.trace.json.gz    profiler trace, where one was asked for
    <store>/<run_id>/.lock                held (flock) by whoever is executing the run

A row appears whole or not at all: it is written to a temporary file, synced, then linked to its name, which fails
if the name is taken. A predicted row, which costs milliseconds to make again, is not synced: it survives its process,
and may be damaged by a machine that loses power.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.core import files
from bench.core.files import encode_record, read_json
from bench.records.checking import RUN_ID_PATTERN, check_record
from bench.records.packed_rows import PackedRow, find_packed_attempts, open_packed_rows
from bench.records.schema import (
    COLUMN_NAMES,
    EVIDENCE_KINDS,
    FORMAT_VERSION,
    NESTED_PARTS,
    OOM_PHASES,
    STATUSES,
    Record,
)

ATTEMPT_FILE_PATTERN = re.compile(r"^([0-9]{1,15})\.json\Z")


def list_runs(store: str | Path) -> list[str]:
    """The run_id of every run that has a folder or a packed row in a store, sorted.

    Raises
    ------
    OSError
        If there is no such folder, or this account may not read it.
    """
    folders = {entry.name for entry in Path(store).iterdir() if RUN_ID_PATTERN.match(entry.name)}
    return sorted(folders | open_packed_rows(store).rows.keys())


def list_attempts(store: str | Path, run_id: str) -> list[int]:
    """Numbers of the attempts recorded for a run, ascending."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(Path(store) / run_id)
    attempts = {int(match[1]) for name in names if (match := ATTEMPT_FILE_PATTERN.match(name))}
    return sorted(attempts | find_packed_attempts(store, run_id).keys())


def find_next_attempt(store: str | Path, run_id: str) -> int:
    """The number a new attempt of this run gets."""
    return max(list_attempts(store, run_id), default=-1) + 1


def get_row_path(store: str | Path, run_id: str, attempt: int) -> Path:
    """Where the row of one attempt lies, unless it is packed; `read_row` of this path reads both."""
    return Path(store) / run_id / f"{attempt}.json"


def write_row(store: str | Path, record: Record, *, reserved_file: str | Path | None = None) -> Path:
    """Write one row, atomically, and durably unless it is predicted.

    Parameters
    ----------
    reserved_file: Path, optional
        A file in the run's folder to use as the temporary one: disk space that was taken beforehand. Links are not
        followed.

    Returns
    -------
    Path
        The file, ``<store>/<run_id>/<attempt>.json``.

    Raises
    ------
    FileExistsError
        If that attempt already has a row: the first one written stays.
    ValueError
        If the record does not fit the schema.
    OSError
        If the store cannot be written.
    """
    record = {"format": FORMAT_VERSION, **record}
    validate_record(record)
    is_durable = record["evidence"] != "predicted"
    target_path = get_row_path(store, record["run_id"], record["attempt"])
    if record["attempt"] in find_packed_attempts(store, record["run_id"]):
        raise FileExistsError(errno.EEXIST, "this attempt is packed", str(target_path))
    files.make_folder(target_path.parent)
    text = encode_record(record) + "\n"
    if reserved_file is None or Path(reserved_file).is_symlink():
        reserved_file = None
        descriptor, temporary_path = tempfile.mkstemp(dir=target_path.parent, prefix=".row-")
    else:
        descriptor, temporary_path = (
            os.open(reserved_file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644),
            str(reserved_file),
        )
    try:
        with os.fdopen(descriptor, "w") as file:
            files.make_readable(file.fileno())
            file.write(text)
            file.truncate()
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.link(temporary_path, target_path)
    except BaseException:
        if reserved_file is None:  # space taken beforehand is kept for another try
            os.unlink(temporary_path)
        raise
    os.unlink(temporary_path)
    if is_durable:
        files.sync_folder(target_path.parent)
    return target_path


def validate_record(record: Record) -> None:
    """Check a record before it is written.

    Raises
    ------
    ValueError
        If a column is unknown, or a column of fixed vocabulary holds something else.
    """
    unknown_columns = sorted(set(record) - set(COLUMN_NAMES) - set(NESTED_PARTS))
    if unknown_columns:
        raise ValueError(f"columns unknown to the schema: {', '.join(unknown_columns)}")
    for name in ("run_id", "evidence", "status", "started_at"):
        if not record.get(name) and not (name == "started_at" and record.get("evidence") == "published"):
            raise ValueError(f"column {name} is empty")
    for name, vocabulary in (("evidence", EVIDENCE_KINDS), ("status", STATUSES), ("oom_phase", OOM_PHASES)):
        if record.get(name) is not None and record[name] not in vocabulary:
            raise ValueError(f"{name}={record[name]!r} is not one of {', '.join(vocabulary)}")
    if record["status"] == "oom" and record.get("oom_phase") is None:
        raise ValueError("an oom record names the phase (oom_phase)")


@contextlib.contextmanager
def lock_run(store: str | Path, run_id: str, *, blocking: bool = True) -> Iterator[bool]:
    """Hold a run for as long as it executes, so that two sweeps on one store never execute it at once.

    The lock goes with the process that holds it, however it ends. Yields whether the lock was obtained, which is
    always true when `blocking`.
    """
    folder = Path(store) / run_id
    files.make_folder(folder)
    with files.open_lock(folder / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def read_row(path: str | os.PathLike[str]) -> Record:
    """Read the row of one attempt, from its file or packed, bring it to the current format and check it.

    Parameters
    ----------
    path: path
        ``<store>/<run_id>/<attempt>.json``, or a file of whatever name that holds a row.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not a record: torn, foreign, of a later format, or with a value that no row has.
    """
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        packed_row = find_packed_row(path)
        if packed_row is None:
            raise
        return packed_row.read()
    return check_record(content)


def read_row_text(path: str | os.PathLike[str]) -> str:
    """The text of the file of a row, also if the row is packed and no longer has one.

    Raises
    ------
    OSError
        If there is no such row, or it cannot be read.
    ValueError
        If it is packed in a file that is damaged.
    """
    try:
        return Path(path).read_text()
    except (FileNotFoundError, NotADirectoryError):
        packed_row = find_packed_row(path)
        if packed_row is None:
            raise
        return encode_record(packed_row.decode()) + "\n"


def find_packed_row(path: str | os.PathLike[str]) -> PackedRow | None:
    """The packed row of the attempt whose own file would be `path`, ``<store>/<run_id>/<attempt>.json``.

    Raises
    ------
    PermissionError
        If this account may not read the packed rows.
    """
    path = Path(path)
    match = ATTEMPT_FILE_PATTERN.match(path.name)
    return find_packed_attempts(path.parent.parent, path.parent.name).get(int(match[1])) if match else None


def read_latest_row(store: str | Path, run_id: str) -> Record | None:
    """The row of a run's latest attempt, or None where there is none that can be read."""
    for attempt in reversed(list_attempts(store, run_id)):
        with contextlib.suppress(ValueError, OSError):
            return read_row(get_row_path(store, run_id, attempt))
    return None


__all__ = [
    "ATTEMPT_FILE_PATTERN",
    "RUN_ID_PATTERN",
    "find_next_attempt",
    "find_packed_row",
    "get_row_path",
    "list_attempts",
    "list_runs",
    "lock_run",
    "read_latest_row",
    "read_row",
    "read_row_text",
    "validate_record",
    "write_row",
]
