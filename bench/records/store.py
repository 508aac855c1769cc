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
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.records.schema import FORMAT_VERSION, Record, upgrade, validate

RUN_ID = re.compile(r"^[0-9a-f]{16}$")
ATTEMPT_FILE = re.compile(r"^(\d+)\.json$")


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
        A file in the run's folder to use as the temporary one: disk space that was taken beforehand.

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
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    if into is None:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".row-")
    else:
        descriptor, temporary = os.open(into, os.O_WRONLY | os.O_CREAT, 0o644), str(into)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), 0o644)
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
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def read(path: str | os.PathLike[str]) -> Record:
    """Read one row file and bring it to the current format.

    Raises
    ------
    ValueError
        If it is not a record: torn, foreign, or of a later format.
    """
    try:
        return upgrade(json.loads(Path(path).read_text()))
    except UnicodeDecodeError as error:
        raise ValueError(f"not text: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not whole JSON: {error}") from None


def latest(store: str | Path, run_id: str) -> Record | None:
    """The row of a run's latest attempt, or None where there is none that can be read."""
    for attempt in reversed(attempts(store, run_id)):
        with contextlib.suppress(ValueError):
            return read(row_path(store, run_id, attempt))
    return None
