"""One attempt at a run: claim it, know what else is running meanwhile, write its row however it ends."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import records
from bench.config import RunConfig
from bench.launch.ranks import Ended
from bench.launch.verdict import verdict
from bench.measure import environment
from bench.records import Claim, Record, TakenError, claims
from bench.records.encoding import dumps
from bench.records.schema import FORMAT_VERSION
from bench.row import configured_row, environment_row, rank_rows

LOOK_EVERY_S = 5.0
"""How often to look which other runs are on."""

WRITE_AGAIN_S = (1, 5, 20, 60)
"""When the store cannot be written: how long to wait before each further try."""

SHORT_STEP_S = 0.05
"""Few runs that last for a time take shorter steps: for more, disk space is not claimed beforehand."""


def now() -> str:
    """This moment as rows write it: UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass
class Attempt:
    """A claimed run that is executing."""

    config: RunConfig
    claim: Claim
    concurrent: dict[str, Record] = field(default_factory=dict)
    """Runs seen on beside this one, by run_id."""
    _looked: float = -LOOK_EVERY_S

    @classmethod
    def begin(
        cls,
        config: RunConfig,
        store: Path,
        owner: dict[str, Any],
        facts: Record,
        slurm: dict[str, Any] | None = None,
    ) -> Attempt:
        """Claim a run and the disk space of its row.

        Parameters
        ----------
        owner: dict
            Who executes it; `bench.launch.owners` can tell whether it lives.
        facts: Record
            Columns that only the caller knows: sweep, launcher, job.
        slurm: dict, optional
            What the row's environment says of the job.

        Raises
        ------
        TakenError
            If somebody else has it.
        OSError
            If the store cannot be written.
        """
        row = {**configured_row(config), **environment_row([]), **facts, "started_at": now()}
        if slurm is not None:
            row["environment"] = {**row["environment"], "slurm": slurm}
        claim = claims.take(store, row, owner, reserve_bytes=_row_bytes(config))
        return cls(config, claim)

    @property
    def path(self) -> Path:
        """Where the row will lie; trace and log lie beside it."""
        return records.row_path(self.claim.store, self.claim.run_id, self.claim.attempt)

    @property
    def trace(self) -> Path:
        """The profiler trace, if one is asked for."""
        return self.path.with_suffix(".trace.json.gz")

    def look_around(self, *, at_once: bool = False) -> None:
        """Note which other runs of the store are on; cheap, and does nothing if it did a moment ago."""
        if not at_once and time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        for run_id in claims.running(self.claim.store):
            if run_id != self.claim.run_id and run_id not in self.concurrent:
                other = claims.held(self.claim.store, run_id)
                if other is not None:
                    names = ("run_id", "launcher", "job_id", "hosts")
                    self.concurrent[run_id] = {name: other.row.get(name) for name in names}

    def finish(self, ranks: Sequence[Ended], cut_short: Record | None = None) -> Record:
        """Write the row and give the claim back.

        Parameters
        ----------
        ranks: sequence of Ended
            All that are known of.
        cut_short: Record, optional
            Status and error, if the run was not left to end by itself.

        Raises
        ------
        OSError
            If the store cannot be written after all, however often it was tried; says where the row is kept.
        """
        self.look_around(at_once=True)
        outcomes = [rank.outcome for rank in ranks if rank.outcome is not None]
        known, found = self.claim.row, environment_row(outcomes)
        results: Record = {
            **found,
            "hosts": known["hosts"] if "slurm" in known["environment"] else found["hosts"],
            "environment": {**known["environment"], **found["environment"]},
            **(cut_short or verdict(self.config, ranks)),
            "ranks": rank_rows(outcomes),
            "finished_at": now(),
            "trace": self.trace.name if self.trace.exists() else None,
            "concurrent_runs": len(self.concurrent),
            "concurrent": list(self.concurrent.values()),
        }
        row = {**self.claim.row, **results}
        try:
            persistently(lambda: self.claim.write_row(results))
        except OSError as error:
            kept = keep_elsewhere(row)
            raise OSError(error.errno, f"{error.strerror}; the row is kept in {kept} on {environment.host()}") from None
        return row


def keep_elsewhere(row: Record) -> Path:
    """Write a row that its store does not take to a new file that only its owner can read; returns where."""
    descriptor, path = tempfile.mkstemp(prefix=f"{row['run_id']}-{row['attempt']}-", suffix=".json")
    with os.fdopen(descriptor, "w") as file:
        file.write(dumps({"format": FORMAT_VERSION, **row}) + "\n")
    return Path(path)


def say(text: str) -> None:
    """Print a line, if what takes the output can take it: a job's output may be on a disk that is full."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def persistently(write: Callable[[], object]) -> None:
    """Write, again and again while the store refuses: a full disk may be tidied, a file server come back."""
    for pause_s in (*WRITE_AGAIN_S, None):
        try:
            write()
            return
        except OSError as error:
            if pause_s is None:
                raise
            say(f"cannot write the row ({error}); trying again in {pause_s} s")
            time.sleep(pause_s)


def write_lost_row(claim: Claim, *, status: str, error: str) -> bool:
    """Write the row of an attempt whose owner died; False if somebody else was faster."""
    return claim.break_with({"status": status, "error": error, "finished_at": now()})


def write_unstarted_row(known: Record, store: Path, *, status: str, error: str, facts: Record) -> None:
    """Write the row of a run that never came to start; `known` is what `configured_row` says of it."""
    moment = now()
    row: Record = {
        **known,
        **environment_row([]),
        **facts,
        "status": status,
        "error": error,
        "attempt": records.next_attempt(store, known["run_id"]),
        "started_at": moment,
        "finished_at": moment,
    }
    with contextlib.suppress(FileExistsError):
        records.write(store, row)


def _row_bytes(config: RunConfig) -> int:
    """Disk space a row may take: each rank has its facts and a number per step, of which a GPU may take more than were
    asked for."""
    timing = config.measurement
    lasting = ((timing.min_warmup_s or 0.0) + (timing.min_timed_s or 0.0)) / SHORT_STEP_S
    return 64 * 1024 + config.processes * (8192 + 32 * (timing.steps + round(lasting)))


__all__ = ["Attempt", "TakenError", "now", "persistently", "say", "write_lost_row", "write_unstarted_row"]
