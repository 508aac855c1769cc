"""One attempt at a run: claim it, know what else is running meanwhile, write its row however it ends."""

from __future__ import annotations

import contextlib
import datetime
import os
import pwd
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import records
from bench.config.run_config import RunConfig
from bench.core.files import encode_record
from bench.core.presentation import format_memory, format_number
from bench.rank import environment
from bench.rank.row import build_configured_columns, build_environment_columns, build_measured_columns, build_rank_rows
from bench.records import Claim, Record, RunClaimedError, claims
from bench.records.schema import FORMAT_VERSION

if TYPE_CHECKING:
    from bench.launch.ranks import RankExit
    from bench.rank.run_rank import RankOutcome

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
            Who executes it; `bench.launch.attempt` can tell whether it lives.
        launch_columns: Record
            Columns that only the caller knows: sweep, launcher, job.
        slurm_environment: dict, optional
            What the row's environment says of the job.

        Raises
        ------
        RunClaimedError
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
        rank_exits: sequence of RankExit
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
            "ranks": build_rank_rows([rank_exit.outcome or _conclude_outcome(rank_exit) for rank_exit in rank_exits]),
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


# --- What a run as a whole came to, from how each of its ranks ended.


def build_outcome_columns(config: RunConfig, rank_exits: Sequence[RankExit]) -> Record:
    """The row's columns that say how a run ended, all of its ranks having ended.

    A rank killed from outside explains the connection errors of the others, unless it was one of those errors that
    ended it (NCCL's watchdog ends its process): the first is told too. Running out of memory explains them
    too, and a crash under a CPU memory limit is taken for it; otherwise the error that came first does.
    """
    unkillable_exits = [rank_exit for rank_exit in rank_exits if rank_exit.unkillable]
    if unkillable_exits:
        return {"status": "error", "error": "; ".join(_describe_exits(unkillable_exits))}
    unreported_exits = [
        rank_exit for rank_exit in rank_exits if rank_exit.outcome is None and not rank_exit.killed_by_launcher
    ]
    failed_outcomes = [
        rank_exit.outcome
        for rank_exit in rank_exits
        if rank_exit.outcome is not None and rank_exit.outcome.status != "ok"
    ]
    failed_outcomes.sort(key=lambda outcome: (outcome.status != "oom", outcome.failed_at or 0.0))
    if failed_outcomes and failed_outcomes[0].status == "oom":
        first_failure = failed_outcomes[0]
        return {
            "status": "oom",
            "oom_phase": first_failure.phase,
            "oom_bytes": first_failure.oom_bytes,
            "oom_rank": first_failure.rank,
            "error": first_failure.error,
        }
    crashed_exits = [rank_exit for rank_exit in unreported_exits if rank_exit.crashed]
    if crashed_exits and config.hardware.device == "cpu" and config.hardware.memory_limit_gib is not None:
        # Native code seldom survives that malloc gives it nothing: not gloo's, and not the profiler's.
        return {
            "status": "oom",
            "oom_phase": crashed_exits[0].last_phase,
            "oom_bytes": None,
            "oom_rank": crashed_exits[0].rank,
            "error": f"rank {crashed_exits[0].rank} {crashed_exits[0].exit_description} under its memory limit, "
            "taken for lack of memory",
        }
    failure_messages = [f"rank {outcome.rank}, {outcome.phase}: {outcome.error}" for outcome in failed_outcomes[:1]]
    if unreported_exits or failure_messages:
        return {"status": "error", "error": "; ".join([*_describe_exits(unreported_exits), *failure_messages])}
    return {
        "status": "ok",
        **build_measured_columns(
            config, [rank_exit.outcome for rank_exit in rank_exits if rank_exit.outcome is not None]
        ),
    }


def _conclude_outcome(rank_exit: RankExit) -> RankOutcome:
    """What became of a rank that did not live to say it."""
    from bench.rank.run_rank import RankOutcome

    status, error = "error", rank_exit.exit_description
    if rank_exit.killed_by_launcher:
        status, error = "killed", "had not ended when the run had to, and was killed"
    return RankOutcome(rank_exit.rank, rank_exit.host, status, error=error, phase=rank_exit.last_phase)


def _describe_exits(rank_exits: Sequence[RankExit]) -> Iterator[str]:
    """How ranks ended, those that ended alike in one: ``rank 2 (and 3, 4) was killed by SIGKILL``."""
    ranks_by_description: dict[str, list[int]] = {}
    for rank_exit in rank_exits:
        ranks_by_description.setdefault(rank_exit.exit_description, []).append(rank_exit.rank)
    for exit_description, (first_rank, *other_ranks) in ranks_by_description.items():
        others_text = f" (and {', '.join(map(str, other_ranks))})" if other_ranks else ""
        yield f"rank {first_rank}{others_text} {exit_description}"


def describe_outcome(record: Record) -> str:
    """What became of a run, in a few words."""
    if record["status"] == "ok":
        tflops, step_s = record.get("tflops_per_gpu"), record.get("step_time_median_s")
        if tflops is None or step_s is None:
            return "fits; no time is known"
        nonfinite_step = record.get("first_nonfinite_loss_step")
        divergence_text = "" if nonfinite_step is None else f", loss not finite from step {nonfinite_step}"
        return f"{step_s * 1000:.1f} ms/step, {format_number(tflops)} TFLOP/s per rank{divergence_text}"
    if record["status"] == "oom":
        requested_bytes = record.get("oom_bytes")
        return f"out of memory in {record['oom_phase']}" + (
            f", asking for {format_memory(requested_bytes)}" if requested_bytes else ""
        )
    return str(record.get("error"))


# --- Who executes a run, and whether they still live.


def describe_this_process() -> dict[str, Any]:
    """This process as the owner of a run."""
    return {"host": environment.get_host_name(), "pid": os.getpid(), "started": _read_start_ticks(os.getpid())}


def get_user_name() -> str:
    """Name of the account that this process runs as, or its number if it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def is_process_alive(owner: Any) -> bool:
    """Whether the process that `describe_this_process` described still runs; one on another machine is taken to.

    What describes no process is none that lives.
    """
    if not isinstance(owner, dict):
        return False
    pid, start_ticks = owner.get("pid"), owner.get("started")
    if type(pid) is not int or type(start_ticks) is not int:
        return False
    return owner.get("host") != environment.get_host_name() or _read_start_ticks(pid) == start_ticks


def describe_owner(owner: Mapping[str, Any]) -> str:
    """Who has a claim, for a sentence: ``job 12_3``, or ``process 7 on node1``."""
    process = owner.get("process")
    if isinstance(process, dict):
        return f"process {process.get('pid')} on {process.get('host')}"
    return f"job {owner.get('job')}"


def _read_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: tells it from a later one of the same number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    stat_fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if stat_fields[0] == "Z" else int(stat_fields[19])
