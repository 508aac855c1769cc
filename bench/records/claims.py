"""Claims: who is executing which run of a store right now.

    <store>/.running/<run_id>.claim       the claim: owner, attempt, and the row as far as it is known
    <store>/<run_id>/.row-<attempt>       disk space the row will need, taken beforehand

A claim is exclusive, on every machine that shares the store's file system: it appears whole under its name or not at
all, by `link`, as rows do. It does not go away with its owner: whoever finds one whose owner is dead breaks it and
writes down what became of that attempt, so no attempt vanishes. Who is dead only the launcher can tell.

A claim that cannot be read (a disk lost its content, somebody else wrote it) says nothing of its owner. It is put aside
as ``.unreadable-<run_id>-…``, and its run can be claimed again. Should its owner live all the same, its row gets the
number of the next attempt.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core import files
from bench.core.files import encode_record, read_json, write_temporary_file
from bench.records.schema import FORMAT_VERSION, Record
from bench.records.store import RUN_ID_PATTERN, find_next_attempt, get_row_path, write_row

CLAIMS_FOLDER = ".running"

MAX_WRITE_DELAY_S = 10.0
"""A claim appears whole, but a network file system may show its content later than its name. One that cannot be read
and was changed longer ago than this is not being written."""

POLL_INTERVAL_S = 0.2

JOB_ID_PATTERN = re.compile(r"^[0-9]{1,20}(_[0-9]{1,20})?\Z")


class RunClaimedError(Exception):
    """Somebody else is executing the run."""

    def __init__(self, claim: Claim) -> None:
        super().__init__(f"run {claim.run_id} is being executed by {claim.owner}")
        self.claim = claim


@dataclass(frozen=True)
class Claim:
    """The right to execute a run and write the row of one attempt."""

    store: Path
    run_id: str
    attempt: int
    owner: dict[str, Any]
    """Who executes it, in the launcher's own terms."""
    row: Record
    """What is known of the row before the run."""

    @property
    def path(self) -> Path:
        return self.store / CLAIMS_FOLDER / f"{self.run_id}.claim"

    @property
    def reserved_file(self) -> Path:
        """The file that holds disk space for the row."""
        return self.store / self.run_id / f".row-{self.attempt}"

    def write_row(self, results: Record) -> Path:
        """Write the row of this attempt into the space reserved for it, and give the claim back.

        If somebody else has written a row under the attempt's number (it was taken for dead), this one gets the next.

        Raises
        ------
        OSError
            If the store cannot be written; the claim stays.
        """
        row = {**self.row, **results}
        while True:
            try:
                path = write_row(self.store, row, reserved_file=self.reserved_file)
                break
            except FileExistsError:
                path = get_row_path(self.store, self.run_id, row["attempt"])
                if path.exists() and path.read_text() == encode_record({"format": FORMAT_VERSION, **row}) + "\n":
                    break  # it was written by an earlier try, which could not say so
                row["attempt"] = find_next_attempt(self.store, self.run_id)
        self.release()
        return path

    def release(self) -> None:
        """Give the claim back, unless it was taken for that of a dead owner and is somebody else's by now."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.reserved_file)
        with contextlib.suppress(FileNotFoundError, ValueError):
            current_claim = _read_claim(self.store, self.path, self.run_id)
            if current_claim is not None and (encode_record(current_claim.owner), current_claim.attempt) == (
                encode_record(self.owner),
                self.attempt,
            ):
                os.unlink(self.path)

    def break_claim(self, results: Record) -> bool:
        """Write the row of an attempt whose owner is dead; False if somebody else was faster, or nothing can be told.

        Raises
        ------
        OSError
            If the store cannot be written; the claim stays.
        """
        broken_path = self.path.with_name(f".broken-{self.run_id}-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            self.path.rename(broken_path)
        except FileNotFoundError:
            return False
        try:
            taken_claim = _read_claim(self.store, broken_path, self.run_id)
        except ValueError:
            taken_claim = None
        if taken_claim is not None and (taken_claim.owner, taken_claim.attempt) != (self.owner, self.attempt):
            self._restore_file(broken_path)
            return False
        reserved_file = (
            self.reserved_file if files.is_own_file(self.reserved_file) else None
        )  # another account's cannot be written to
        try:
            with contextlib.suppress(FileExistsError):  # it had written its row, and died before giving the claim back
                write_row(self.store, {**self.row, **results}, reserved_file=reserved_file)
        except ValueError:  # what it says of its run is no row
            _quarantine_file(broken_path, self.run_id)
            return False
        except OSError:
            self._restore_file(broken_path)
            raise
        for path in (self.reserved_file, broken_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return True

    def _restore_file(self, broken_path: Path) -> None:
        """Give a claim its name again, unless there is a new one by now."""
        try:
            os.link(broken_path, self.path)
        except FileExistsError:
            pass
        except PermissionError:  # another account's file, which Linux may not let be linked
            if not self.path.exists():
                broken_path.rename(self.path)
                return
        os.unlink(broken_path)


def take_claim(store: Path, row: Record, owner: dict[str, Any], reserve_bytes: int) -> Claim:
    """Claim a run for its next attempt, and the disk space its row will need.

    Parameters
    ----------
    row: Record
        What is known of the row: at least `run_id`. The attempt's number is added.

    Raises
    ------
    RunClaimedError
        If somebody else has the run.
    OSError
        If the store cannot be written or has no space left for the row.
    """
    run_id = row["run_id"]
    files.make_folder(store / CLAIMS_FOLDER)
    files.make_folder(store / run_id)
    while True:
        attempt = find_next_attempt(store, run_id)
        claim = Claim(store, run_id, attempt, owner, {**row, "attempt": attempt})
        _create_claim_file(claim)
        if find_next_attempt(store, run_id) == attempt:
            break
        claim.release()  # between the two, its holder before us wrote a row
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(claim.reserved_file)
        with claim.reserved_file.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, reserve_bytes)
    except OSError:
        claim.release()
        raise
    return claim


def _create_claim_file(claim: Claim) -> None:
    """Make the claim's file appear, or raise `RunClaimedError`."""
    content = {"attempt": claim.attempt, "owner": claim.owner, "row": claim.row}
    temporary_path = write_temporary_file(claim.path.parent, encode_record(content))
    try:
        while True:
            try:
                os.link(temporary_path, claim.path)
                return
            except FileExistsError:
                try:
                    current_claim = _read_claim(claim.store, claim.path, claim.run_id)
                except ValueError:
                    _wait_or_quarantine(claim)
                    continue
                if current_claim is not None:
                    raise RunClaimedError(current_claim) from None
    finally:
        os.unlink(temporary_path)


def _wait_or_quarantine(claim: Claim) -> None:
    """Of a claim that cannot be read: give it time to be read, then put it aside."""
    with contextlib.suppress(FileNotFoundError):
        if abs(time.time() - claim.path.lstat().st_mtime) > MAX_WRITE_DELAY_S:
            _quarantine_file(claim.path, claim.run_id)
        else:
            time.sleep(POLL_INTERVAL_S)


def _quarantine_file(path: Path, run_id: str) -> None:
    """Rename a claim to where it claims nothing and can be looked at."""
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_name(f".unreadable-{run_id}-{os.urandom(4).hex()}"))


def find_claim(store: Path, run_id: str) -> Claim | None:
    """The claim on a run, if there is one that can be read."""
    with contextlib.suppress(ValueError):
        return _read_claim(store, store / CLAIMS_FOLDER / f"{run_id}.claim", run_id)
    return None


def list_claimed_runs(store: Path) -> list[str]:
    """Runs of a store that are claimed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [name.removesuffix(".claim") for name in os.listdir(store / CLAIMS_FOLDER)]
        return sorted(name for name in names if RUN_ID_PATTERN.match(name))
    return []


def _read_claim(store: Path, path: Path, run_id: str) -> Claim | None:
    """A claim; None where there is none.

    Raises
    ------
    ValueError
        If it cannot be read, or is no claim on this run.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a claim")
    attempt, owner, row = (content.get(name) for name in ("attempt", "owner", "row"))
    if type(attempt) is not int or attempt < 0 or not isinstance(owner, dict) or not isinstance(row, dict):
        raise ValueError(f"{path}: not a claim")
    if not _is_valid_owner(owner):
        raise ValueError(f"{path}: not a claim of a process or a job")
    if row.get("run_id") != run_id or row.get("attempt") != attempt:
        raise ValueError(f"{path}: not a claim on this run")
    return Claim(store, run_id, attempt, owner, row)


def _is_valid_owner(owner: dict[str, Any]) -> bool:
    """Whether this is a process, or a SLURM job's start; a job's id becomes an argument of SLURM's commands."""
    job, restart = owner.get("job"), owner.get("restart")
    if isinstance(job, str) and JOB_ID_PATTERN.match(job) and type(restart) is int and restart >= 0:
        return True
    return isinstance(owner.get("process"), dict)
