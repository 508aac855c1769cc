"""The ledger: what was submitted from a store, so that any shell can follow it later.

<store>/.jobs/<submission>/submission.json     what was asked for; written before anything is submitted
<store>/.jobs/<submission>/<array>/job_id      SLURM's id of the array, written as soon as there is one
<store>/.jobs/<submission>/<array>/...         submitit's files and the processes' output
<store>/.jobs/<submission>/closed              everything in it is over and written down
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = ".jobs"


@dataclass(frozen=True)
class Entry:
    """One task of an array."""

    run_id: str
    label: str
    search: bool
    attempts_before: int
    """Attempts of the run recorded when it was submitted."""


@dataclass(frozen=True)
class Array:
    """One job array: tasks of equal resources."""

    name: str
    job_name: str
    nodes: int
    tasks_per_node: int
    time_limit_min: int
    expected_s: float
    """Of all tasks together."""
    entries: list[Entry]
    gpus_per_task: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of each run."""
        return self.nodes * self.tasks_per_node * self.gpus_per_task

    @property
    def gpu_hours(self) -> float:
        """GPU-hours that all tasks together are expected to take."""
        return self.expected_s * self.gpus / 3600

    @property
    def most_gpu_hours(self) -> float:
        """GPU-hours if every task takes all of its time."""
        return self.time_limit_min * self.gpus * len(self.entries) / 60

    def element(self, job_id: str, index: int) -> str:
        """Id of one task's job: submitit submits a single task as a plain job."""
        return f"{job_id}_{index}" if len(self.entries) > 1 else job_id


@dataclass(frozen=True)
class Submission:
    """Everything one command submitted."""

    folder: Path
    sweep: str
    submitted_at: str
    cluster: dict[str, Any]
    code: str
    """Name of the snapshot."""
    arrays: list[Array]
    tracker: dict[str, Any] | None = None
    """Where attempts are sent, as composed."""

    @property
    def name(self) -> str:
        """Its name in the ledger."""
        return self.folder.name

    @property
    def closed(self) -> bool:
        """Whether everything in it is over and written down."""
        return (self.folder / "closed").exists()

    def close(self) -> None:
        """Mark as over."""
        (self.folder / "closed").touch()

    def job_id(self, array: Array) -> str | None:
        """SLURM's id of an array; None if it was not submitted, or is about to be."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / array.name / "job_id").read_text().strip()
        return None

    def note_job_id(self, array: Array, job_id: str) -> None:
        """Write down SLURM's id of an array."""
        _write_whole(self.folder / array.name / "job_id", job_id)


def enter(
    store: Path,
    sweep: str,
    cluster: dict[str, Any],
    code: str,
    arrays: list[Array],
    name: str,
    tracker: dict[str, Any] | None = None,
) -> Submission:
    """Write down a submission that is about to happen."""
    folder = store / FOLDER / name
    for array in arrays:
        (folder / array.name).mkdir(parents=True)
    submitted_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    submission = Submission(folder, sweep, submitted_at, cluster, code, arrays, tracker)
    values = dataclasses.asdict(submission)
    del values["folder"]
    _write_whole(folder / "submission.json", json.dumps(values, indent=1))
    return submission


def new_name() -> str:
    """A name for a submission: sorts by time, and is never given twice."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def submissions(store: Path, *, closed: bool = False) -> list[Submission]:
    """A store's submissions, the oldest first: those that are not over yet, or all."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(store / FOLDER)):
            submission = _read(store / FOLDER / name)
            if submission is not None and (closed or not submission.closed):
                found.append(submission)
    return found


def _read(folder: Path) -> Submission | None:
    try:
        values = json.loads((folder / "submission.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    arrays = [
        Array(**{**array, "entries": [Entry(**entry) for entry in array["entries"]]}) for array in values["arrays"]
    ]
    return Submission(**{**values, "folder": folder, "arrays": arrays})


@contextlib.contextmanager
def submitting(store: Path) -> Iterator[None]:
    """One command at a time looks at what is queued and submits the rest."""
    (store / FOLDER).mkdir(parents=True, exist_ok=True)
    with (store / FOLDER / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text + "\n")
    temporary.replace(path)
