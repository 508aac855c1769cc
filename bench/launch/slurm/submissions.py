"""Submission records: what was submitted from a store, so that any shell can follow it later.

<store>/.jobs/<submission>/submission.json     what was asked for; written before anything is submitted
<store>/.jobs/<submission>/cancelled           ids of the jobs that were cancelled from here
<store>/.jobs/<submission>/<array>/job_id      SLURM's id of the array, written as soon as there is one
<store>/.jobs/<submission>/<array>/...         the job script, what each task executes (<index>.pkl), their output
<store>/.jobs/<submission>/closed              everything in it is over and written down
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import types
import typing
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from bench.core import files
from bench.core.errors import invalid_value_error
from bench.core.files import encode_record, format_value, read_json, replace_file
from bench.launch.attempt import get_user_name
from bench.records import UnreadableRecordWarning
from bench.records.store import RUN_ID_PATTERN

JOBS_FOLDER = ".jobs"

DataclassT = TypeVar("DataclassT")


@dataclass(frozen=True)
class SubmittedRun:
    """One task of an array."""

    run_id: str
    label: str
    search: bool
    attempts_before: int
    """Attempts of the run recorded when it was submitted."""
    row: dict[str, Any] | None = None
    """What is known of the run's row before it starts; None in submissions of earlier versions, and of searches."""


@dataclass(frozen=True)
class JobArray:
    """One job array: tasks of equal resources."""

    name: str
    job_name: str
    nodes: int
    tasks_per_node: int
    time_limit_min: int
    expected_s: float
    """Of all tasks together."""
    entries: list[SubmittedRun]
    gpus_per_task: int = 1
    longest_s: float = 0.0
    """Expected of the longest task."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.tasks_per_node * self.gpus_per_task

    @property
    def gpu_hours(self) -> float:
        """GPU-hours that all tasks together are expected to take."""
        return self.expected_s * self.gpus / 3600

    @property
    def max_gpu_hours(self) -> float:
        """GPU-hours if every task takes all of its time."""
        return self.time_limit_min * self.gpus * len(self.entries) / 60

    def build_element_id(self, job_id: str, index: int) -> str:
        """Id of one task's job: submitit submits a single task as a plain job."""
        return f"{job_id}_{index}" if len(self.entries) > 1 else job_id


@dataclass(frozen=True)
class Submission:
    folder: Path
    sweep: str
    submitted_at: str
    cluster: dict[str, Any]
    code: str
    """Name of the snapshot."""
    arrays: list[JobArray]
    tracker: dict[str, Any] | None = None
    """Where attempts are sent, as composed."""
    user: str | None = None
    """Whose account submitted it; None in stores of before that was noted."""

    @property
    def is_own(self) -> bool:
        """Whether this account submitted it."""
        return self.user in (None, get_user_name())

    @property
    def name(self) -> str:
        """Its name among the store's submissions."""
        return self.folder.name

    @property
    def is_closed(self) -> bool:
        """Whether everything in it is over and written down."""
        return (self.folder / "closed").exists()

    def close(self) -> None:
        (self.folder / "closed").touch()

    def read_job_id(self, array: JobArray) -> str | None:
        """SLURM's id of an array; None if it was not submitted, or is about to be."""
        with contextlib.suppress(FileNotFoundError):
            job_id = (self.folder / array.name / "job_id").read_text(errors="replace").strip()
            return job_id if re.fullmatch("[0-9]{1,20}", job_id) else None
        return None

    def write_job_id(self, array: JobArray, job_id: str) -> None:
        """Write down SLURM's id of an array."""
        replace_file(self.folder / array.name / "job_id", job_id + "\n")

    def write_cancelled_job_ids(self, job_ids: Iterable[str]) -> None:
        """Write down which jobs are about to be cancelled: SLURM forgets those that never ran."""
        replace_file(self.folder / "cancelled", "\n".join(sorted({*self.cancelled_job_ids, *job_ids})) + "\n")

    @property
    def cancelled_job_ids(self) -> set[str]:
        """Ids of the jobs that were cancelled from here."""
        with contextlib.suppress(FileNotFoundError):
            return set((self.folder / "cancelled").read_text(errors="replace").split())
        return set()


def write_submission(
    store: Path,
    sweep: str,
    cluster: dict[str, Any],
    code: str,
    arrays: list[JobArray],
    name: str,
    tracker: dict[str, Any] | None = None,
) -> Submission:
    """Write down a submission that is about to happen."""
    folder = store / JOBS_FOLDER / name
    for array in arrays:
        files.make_folder(folder / array.name)
    submitted_at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    submission = Submission(folder, sweep, submitted_at, cluster, code, arrays, tracker, get_user_name())
    values = dataclasses.asdict(submission)
    del values["folder"]
    replace_file(folder / "submission.json", encode_record(values) + "\n")
    return submission


def create_submission_name() -> str:
    """A name for a submission: sorts by time, and is never given twice."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{os.urandom(3).hex()}"


def list_submissions(store: Path, *, include_closed: bool = False) -> list[Submission]:
    """A store's submissions, the oldest first: those that are not over yet, or all.

    Raises
    ------
    UsageError
        If they cannot be listed.
    """
    try:
        names = sorted(os.listdir(store / JOBS_FOLDER))
    except FileNotFoundError:
        return []
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise invalid_value_error("store", store, f"a folder that can be read ({reason})") from None
    all_submissions = [
        submission for name in names if (submission := _read_submission(store / JOBS_FOLDER / name)) is not None
    ]
    return [submission for submission in all_submissions if include_closed or not submission.is_closed]


def _read_submission(folder: Path) -> Submission | None:
    """A submission; None where there is none, or it cannot be read, which is said."""
    file = folder / "submission.json"
    try:
        values = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        warnings.warn(f"left out: {file}: {error}", UnreadableRecordWarning, stacklevel=2)
        return None
    try:
        return _parse_submission(folder, values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"left out: {file}: not a submission ({error})", UnreadableRecordWarning, stacklevel=2)
        return None


def _parse_submission(folder: Path, values: Any) -> Submission:
    """A submission from what its file says.

    Names become parts of paths and of SLURM's commands, so they are checked: a store is data.

    Raises
    ------
    ValueError, TypeError, KeyError, AttributeError
        If it says something else.
    """
    arrays = []
    for array in values["arrays"]:
        entries = [_check_field_types(SubmittedRun(**entry)) for entry in array["entries"]]
        arrays.append(_check_field_types(JobArray(**{**array, "entries": entries})))
        if not entries or not all(RUN_ID_PATTERN.match(entry.run_id) for entry in entries):
            raise ValueError("an array without runs, or with a wrong run_id")
        if any(entry.row is not None and entry.row.get("run_id") != entry.run_id for entry in entries):
            raise ValueError("the row of another run")
        for name in (arrays[-1].name, arrays[-1].job_name):
            if not re.fullmatch(r"[\w-][\w.-]*", name):
                raise ValueError(f"{name!r} is not the name of an array")
    return _check_field_types(Submission(**{**values, "folder": folder, "arrays": arrays}))


def _check_field_types(instance: DataclassT) -> DataclassT:
    """A dataclass whose fields have the types it declares."""
    for name, declared_type in typing.get_type_hints(type(instance)).items():
        accepted_types = (
            typing.get_args(declared_type) if isinstance(declared_type, types.UnionType) else (declared_type,)
        )
        value = getattr(instance, name)
        if not isinstance(
            value, tuple(typing.get_origin(accepted_type) or accepted_type for accepted_type in accepted_types)
        ) or (isinstance(value, bool) and bool not in accepted_types):
            raise ValueError(f"{name}={format_value(value)}")
    return instance


@contextlib.contextmanager
def hold_submission_lock(store: Path) -> Iterator[None]:
    """One command at a time looks at what is queued and submits the rest.

    Raises
    ------
    UsageError
        If this account may not write to the store's submission records.
    """
    path = store / JOBS_FOLDER / ".lock"
    try:
        files.make_folder(path.parent)
        opened_lock = files.open_lock(path)
    except OSError as error:
        raise invalid_value_error(
            "store", store, f"a folder that can be written to ({path}: {error.strerror})"
        ) from None
    with opened_lock as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
