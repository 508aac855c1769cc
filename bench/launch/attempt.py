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
from bench.config.run_config import RunConfig
from bench.launch.ranks import RankExit
from bench.launch.run_outcome import build_outcome_columns
from bench.rank import environment
from bench.rank.row import build_configured_columns, build_environment_columns, build_rank_rows
from bench.records import Claim, Record, RunClaimedError, claims
from bench.records.encoding import encode_record
from bench.records.schema import FORMAT_VERSION

CONCURRENT_RUNS_INTERVAL_S = 5.0
"""How often to look which other runs are on."""

WRITE_RETRY_DELAYS_S = (1, 5, 20, 60)
"""When the store cannot be written: how long to wait before each further try."""

MIN_STEP_TIME_S = 0.05
"""Few runs that last for a time take shorter steps: for more, disk space is not claimed beforehand."""


def format_current_time() -> str:
    """This moment as rows write it: UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass
class Attempt:
    """A claimed run that is executing."""

    config: RunConfig
    claim: Claim
    concurrent_runs: dict[str, Record] = field(default_factory=dict)
    """Runs seen on beside this one, by run_id."""
    _noted_at_s: float = -CONCURRENT_RUNS_INTERVAL_S

    @classmethod
    def begin(
        cls,
        config: RunConfig,
        store: Path,
        owner: dict[str, Any],
        launch_columns: Record,
        slurm_environment: dict[str, Any] | None = None,
    ) -> Attempt:
        """Claim a run and the disk space of its row.

        Parameters
        ----------
        owner: dict
            Who executes it; `bench.launch.process_owner` can tell whether it lives.
        launch_columns: Record
            Columns that only the caller knows: sweep, launcher, job.
        slurm_environment: dict, optional
            What the row's environment says of the job.

        Raises
        ------
        TakenError
            If somebody else has it.
        OSError
            If the store cannot be written.
        """
        row = {
            **build_configured_columns(config),
            **build_environment_columns([]),
            **launch_columns,
            "started_at": format_current_time(),
        }
        if slurm_environment is not None:
            row["environment"] = {**row["environment"], "slurm": slurm_environment}
        claim = claims.take_claim(store, row, owner, reserve_bytes=_compute_max_row_bytes(config))
        return cls(config, claim)

    @property
    def row_path(self) -> Path:
        """Where the row will lie; trace and log lie beside it."""
        return records.get_row_path(self.claim.store, self.claim.run_id, self.claim.attempt)

    @property
    def trace_path(self) -> Path:
        """The profiler trace, if one is asked for."""
        return self.row_path.with_suffix(".trace.json.gz")

    def note_concurrent_runs(self, *, ignore_interval: bool = False) -> None:
        """Note which other runs of the store are on; cheap, and does nothing if it did a moment ago."""
        if not ignore_interval and time.monotonic() - self._noted_at_s < CONCURRENT_RUNS_INTERVAL_S:
            return
        self._noted_at_s = time.monotonic()
        for run_id in claims.list_claimed_runs(self.claim.store):
            if run_id != self.claim.run_id and run_id not in self.concurrent_runs:
                other_claim = claims.find_claim(self.claim.store, run_id)
                if other_claim is not None:
                    columns = ("run_id", "launcher", "job_id", "hosts")
                    self.concurrent_runs[run_id] = {column: other_claim.row.get(column) for column in columns}

    def finish(self, rank_exits: Sequence[RankExit], abort_outcome: Record | None = None) -> Record:
        """Write the row and give the claim back.

        Parameters
        ----------
        rank_exits: sequence of Ended
            All that are known of.
        abort_outcome: Record, optional
            Status and error, if the run was not left to end by itself.

        Raises
        ------
        OSError
            If the store cannot be written after all, however often it was tried; says where the row is kept.
        """
        self.note_concurrent_runs(ignore_interval=True)
        rank_outcomes = [rank_exit.outcome for rank_exit in rank_exits if rank_exit.outcome is not None]
        claimed_row, environment_columns = self.claim.row, build_environment_columns(rank_outcomes)
        result_columns: Record = {
            **environment_columns,
            "hosts": claimed_row["hosts"] if "slurm" in claimed_row["environment"] else environment_columns["hosts"],
            "environment": {**claimed_row["environment"], **environment_columns["environment"]},
            **(abort_outcome or build_outcome_columns(self.config, rank_exits)),
            "ranks": build_rank_rows(rank_outcomes),
            "finished_at": format_current_time(),
            "trace": self.trace_path.name if self.trace_path.exists() else None,
            "concurrent_runs": len(self.concurrent_runs),
            "concurrent": list(self.concurrent_runs.values()),
        }
        row = {**self.claim.row, **result_columns}
        try:
            write_with_retries(lambda: self.claim.write_row(result_columns))
        except OSError as error:
            kept_path = save_row_to_temp_file(row)
            raise OSError(
                error.errno, f"{error.strerror}; the row is kept in {kept_path} on {environment.get_host_name()}"
            ) from None
        return row


def save_row_to_temp_file(row: Record) -> Path:
    """Write a row that its store does not take to a new file that only its owner can read; returns where."""
    descriptor, path = tempfile.mkstemp(prefix=f"{row['run_id']}-{row['attempt']}-", suffix=".json")
    with os.fdopen(descriptor, "w") as file:
        file.write(encode_record({"format": FORMAT_VERSION, **row}) + "\n")
    return Path(path)


def print_safely(text: str) -> None:
    """Print a line, if what takes the output can take it: a job's output may be on a disk that is full."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def write_with_retries(write: Callable[[], object]) -> None:
    """Write, again and again while the store refuses: a full disk may be tidied, a file server come back."""
    for pause_s in (*WRITE_RETRY_DELAYS_S, None):
        try:
            write()
            return
        except OSError as error:
            if pause_s is None:
                raise
            print_safely(f"cannot write the row ({error}); trying again in {pause_s} s")
            time.sleep(pause_s)


def write_lost_row(claim: Claim, *, status: str, error: str) -> bool:
    """Write the row of an attempt whose owner died; False if somebody else was faster."""
    return claim.break_claim({"status": status, "error": error, "finished_at": format_current_time()})


def write_unstarted_row(
    configured_columns: Record, store: Path, *, status: str, error: str, launch_columns: Record
) -> None:
    """Write the row of a run that never came to start; `configured_columns` is what `build_configured_columns` says of
    it."""
    timestamp = format_current_time()
    row: Record = {
        **configured_columns,
        **build_environment_columns([]),
        **launch_columns,
        "status": status,
        "error": error,
        "attempt": records.find_next_attempt(store, configured_columns["run_id"]),
        "started_at": timestamp,
        "finished_at": timestamp,
    }
    with contextlib.suppress(FileExistsError):
        records.write_row(store, row)


def _compute_max_row_bytes(config: RunConfig) -> int:
    """Disk space a row may take: each rank has its facts and a number per step, of which a GPU may take more than were
    asked for."""
    measurement = config.measurement
    steps_by_duration = ((measurement.min_warmup_s or 0.0) + (measurement.min_timed_s or 0.0)) / MIN_STEP_TIME_S
    return 64 * 1024 + config.active_processes * (8192 + 32 * (measurement.steps + round(steps_by_duration)))


__all__ = [
    "Attempt",
    "RunClaimedError",
    "format_current_time",
    "print_safely",
    "write_lost_row",
    "write_unstarted_row",
    "write_with_retries",
]
