"""Claims: who is executing which run of a store right now.

    <store>/.running/<run_id>.claim       the claim: owner, attempt, and the row as far as it is known
    <store>/<run_id>/.row-<attempt>       disk space the row will need, taken beforehand

A claim is exclusive, on every machine that shares the store's file system: it appears whole under its name or not at
all, by `link`, as rows do. It does not go away with its owner: whoever finds one whose owner is dead breaks it and
writes down what became of that attempt, so no attempt vanishes. Who is dead only the launcher can tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.records.schema import Record
from bench.records.store import RUN_ID, next_attempt, write

FOLDER = ".running"


class TakenError(Exception):
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
        """The claim's file."""
        return self.store / FOLDER / f"{self.run_id}.claim"

    @property
    def reserve(self) -> Path:
        """The file that holds disk space for the row."""
        return self.store / self.run_id / f".row-{self.attempt}"

    def write_row(self, results: Record) -> Path:
        """Write the row of this attempt into the space reserved for it, and give the claim back.

        Raises
        ------
        OSError
            If the store cannot be written; the claim stays.
        """
        path = write(self.store, {**self.row, **results}, into=self.reserve)
        self.release()
        return path

    def release(self) -> None:
        """Give the claim back."""
        for path in (self.reserve, self.path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def break_with(self, results: Record) -> bool:
        """Write the row of an attempt whose owner is dead; False if somebody else was faster."""
        broken = self.path.with_name(f".broken-{self.run_id}-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            self.path.rename(broken)
        except FileNotFoundError:
            return False
        taken = _read(self.store, broken)
        if taken is not None and (taken.owner, taken.attempt) != (self.owner, self.attempt):
            with contextlib.suppress(FileExistsError):  # a new claim by now: put it back
                os.link(broken, self.path)
            os.unlink(broken)
            return False
        with contextlib.suppress(FileExistsError):  # it had written its row, and died before it gave the claim back
            write(self.store, {**self.row, **results}, into=self.reserve)
        for path in (self.reserve, broken):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return True


def take(store: Path, row: Record, owner: dict[str, Any], reserve_bytes: int) -> Claim:
    """Claim a run for its next attempt, and the disk space its row will need.

    Parameters
    ----------
    row: Record
        What is known of the row: at least `run_id`. The attempt's number is added.

    Raises
    ------
    TakenError
        If somebody else has the run.
    OSError
        If the store cannot be written or has no space left for the row.
    """
    run_id = row["run_id"]
    (store / FOLDER).mkdir(parents=True, exist_ok=True)
    (store / run_id).mkdir(parents=True, exist_ok=True)
    while True:
        attempt = next_attempt(store, run_id)
        claim = Claim(store, run_id, attempt, owner, {**row, "attempt": attempt})
        _link_whole(claim)
        if next_attempt(store, run_id) == attempt:
            break
        claim.release()  # between the two, its holder before us wrote a row
    try:
        with claim.reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, reserve_bytes)
    except OSError:
        claim.release()
        raise
    return claim


def _link_whole(claim: Claim) -> None:
    """Make the claim's file appear, or raise `TakenError`."""
    content = {"attempt": claim.attempt, "owner": claim.owner, "row": claim.row}
    descriptor, temporary = tempfile.mkstemp(dir=claim.path.parent, prefix=".claim-")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        while True:
            try:
                os.link(temporary, claim.path)
                return
            except FileExistsError:
                holder = held(claim.store, claim.run_id)
                if holder is not None:
                    raise TakenError(holder) from None
    finally:
        os.unlink(temporary)


def held(store: Path, run_id: str) -> Claim | None:
    """The claim on a run, if there is one."""
    return _read(store, store / FOLDER / f"{run_id}.claim", run_id)


def running(store: Path) -> list[str]:
    """Runs of a store that are claimed."""
    with contextlib.suppress(FileNotFoundError):
        names = [name.removesuffix(".claim") for name in os.listdir(store / FOLDER)]
        return sorted(name for name in names if RUN_ID.match(name))
    return []


def _read(store: Path, path: Path, run_id: str | None = None) -> Claim | None:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    row = content["row"]
    return Claim(store, run_id or row["run_id"], content["attempt"], content["owner"], row)
