"""The store: one folder per run, one file per attempt, nothing ever overwritten.

    <store>/<run_id>/<attempt>.json       the row
    <store>/<run_id>/<attempt>.log        what the ranks printed
    <store>/<run_id>/<attempt>.trace.json.gz    profiler trace, where one was asked for
    <store>/<run_id>/.lock                held (flock) by whoever is executing the run

A row appears whole or not at all: it is written to a temporary file, synced, then linked to its name, which fails
if the name is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.records import sharing
from bench.records.checking import RUN_ID, check
from bench.records.encoding import dumps, read_json
from bench.records.schema import FORMAT_VERSION, Record, upgrade, validate

ATTEMPT_FILE = re.compile(r"^([0-9]{1,15})\.json\Z")


def attempts(store: str | Path, run_id: str) -> list[int]:
    """Numbers of the attempts recorded for a run, ascending."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(Path(store) / run_id)
        return sorted(int(match[1]) for name in names if (match := ATTEMPT_FILE.match(name)))
    return []


def next_attempt(store: str | Path, run_id: str) -> int:
    """The number a new attempt of this run gets."""
    return max(attempts(store, run_id), default=-1) + 1


def row_path(store: str | Path, run_id: str, attempt: int) -> Path:
    """Where the row of one attempt lies."""
    return Path(store) / run_id / f"{attempt}.json"


def write(store: str | Path, record: Record, *, into: str | Path | None = None) -> Path:
    """Write one row, atomically and durably.

    Parameters
    ----------
    into: Path, optional
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
    validate(record)
    target = row_path(store, record["run_id"], record["attempt"])
    sharing.make_folder(target.parent)
    text = dumps(record) + "\n"
    if into is None or Path(into).is_symlink():
        into = None
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".row-")
    else:
        descriptor, temporary = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), str(into)
    try:
        with os.fdopen(descriptor, "w") as file:
            sharing.make_readable(file.fileno())
            file.write(text)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, target)
    except BaseException:
        if into is None:  # space taken beforehand is kept for another try
            os.unlink(temporary)
        raise
    os.unlink(temporary)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return target


@contextlib.contextmanager
def lock(store: str | Path, run_id: str, *, blocking: bool = True) -> Iterator[bool]:
    """Hold a run for as long as it executes, so that two sweeps on one store never execute it at once.

    The lock goes with the process that holds it, however it ends. Yields whether the lock was obtained, which is
    always true when `blocking`.
    """
    folder = Path(store) / run_id
    sharing.make_folder(folder)
    with sharing.open_lock(folder / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def read(path: str | os.PathLike[str]) -> Record:
    """Read one row file, bring it to the current format and check it.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not a record: torn, foreign, of a later format, or with a value that no row has.
    """
    return check(upgrade(read_json(path)))


def latest(store: str | Path, run_id: str) -> Record | None:
    """The row of a run's latest attempt, or None where there is none that can be read."""
    for attempt in reversed(attempts(store, run_id)):
        with contextlib.suppress(ValueError, OSError):
            return read(row_path(store, run_id, attempt))
    return None


__all__ = ["ATTEMPT_FILE", "RUN_ID", "attempts", "latest", "lock", "next_attempt", "read", "row_path", "write"]
