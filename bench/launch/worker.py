"""The job that works through tasks on one machine: what submitit starts."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench import records
from bench.config.run_config import RunConfig
from bench.core import files
from bench.launch.attempt import describe_outcome
from bench.launch.ranks import StopSignal
from bench.launch.run_on_host import UnkillableRankError, execute_run, hold_run_lock
from bench.launch.task import LaunchTask, search_largest_batch
from bench.records import Record, RunClaimedError
from bench.records.schema import FINISHED_STATUSES
from bench.tracking import NO_TRACKER, Tracker, TrackerClient

WorkerEvent = dict[str, Any]


@dataclass(frozen=True)
class Worker:
    """Executes tasks one after the other. Called in a process of its own."""

    tasks: list[LaunchTask]
    store: Path
    sweep: str
    time_limit_s: float
    events_path: Path
    """File that events are appended to, one JSON object a line."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES of whoever asked, which submitit's local executor overwrites."""
    deadline: float | None = None
    """On `time.monotonic`, which all processes of a machine share: no run but the first is started that is expected to
    end later."""
    tracker: Tracker = NO_TRACKER
    """Where attempts are sent, each before the next run starts."""

    @property
    def sweep_lock_path(self) -> Path:
        """Locked by the sweep for as long as it lives."""
        return self.events_path.with_name("sweep-alive")

    @property
    def worker_lock_path(self) -> Path:
        """Locked by this job's process for as long as it or a rank of it lives; names it."""
        return self.events_path.with_name("worker-alive")

    def __call__(self) -> None:
        """Work through the tasks until they are done, a signal comes, or the sweep is gone.

        Does nothing if the sweep has given this job up already.
        """
        with files.open_lock(self.worker_lock_path) as lock_file:
            if acquire_worker_lock(lock_file):
                try:
                    self._execute_tasks()
                except UnkillableRankError as error:
                    self._append_event(event="stuck", label=error.label, error=str(error))

    def _execute_tasks(self) -> None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if self.visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible_devices
        with StopSignal() as stop:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back since before this process began
            num_started, out_of_time = 0, False
            tracker_client = TrackerClient(
                self.tracker,
                self.store,
                lambda line: self._append_event(
                    event="tracking", text=line, offline=tracker_client.offline_reason, failure=tracker_client.failure
                ),
                is_stopping=lambda: stop.received is not None,
            )

            def attempt_run(config: RunConfig) -> Record | None:
                nonlocal num_started, out_of_time
                if self._must_stop(stop):
                    return None
                record = records.read_latest_row(self.store, config.run_id)
                if record is not None and record["status"] in FINISHED_STATUSES and not task.force:
                    return record
                if num_started and self.deadline is not None and time.monotonic() + task.expected_s > self.deadline:
                    out_of_time = True
                    return None
                num_started += 1
                record = self._execute_unless_recorded(config, task.force, stop)
                if record is not None:
                    tracker_client.send_runs([config.run_id])
                return record

            for task in self.tasks:
                if task.search:
                    search_largest_batch(task.config, attempt_run)
                else:
                    attempt_run(task.config)
                if out_of_time:
                    self._append_event(event="out of time")
                if out_of_time or self._must_stop(stop):
                    return
                self._append_event(event="task done")

    def _must_stop(self, stop: StopSignal) -> bool:
        return stop.received is not None or self._is_sweep_gone()

    def _execute_unless_recorded(self, config: RunConfig, force: bool, stop: StopSignal) -> Record | None:
        """Execute a run unless it is recorded, or another sweep just executed it; None if a signal came first."""
        with hold_run_lock(self.store, config.run_id, stop) as had_to_wait:
            if stop.received:
                return None
            record = records.read_latest_row(self.store, config.run_id)
            if record is None or record["status"] not in FINISHED_STATUSES or (force and not had_to_wait):
                self._append_event(
                    event="start",
                    label=config.label,
                    batch_size=config.batch_size_per_gpu,
                    attempt=records.find_next_attempt(self.store, config.run_id),
                )
                try:
                    record = execute_run(
                        config,
                        self.store,
                        launcher="local",
                        sweep=self.sweep,
                        time_limit_s=self.time_limit_s,
                        stop=stop,
                        log_to_file=True,
                    )
                except RunClaimedError as error:
                    self._append_event(event="taken", label=config.label, by=error.claim.row.get("job_id"))
                    return None
            status, summary = record["status"], describe_outcome(record)
            self._append_event(event="end", run_id=config.run_id, label=config.label, status=status, summary=summary)
            return record

    def _append_event(self, **event: Any) -> None:
        with self.events_path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def _is_sweep_gone(self) -> bool:
        with self.sweep_lock_path.open() as lock_file:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


REVOKED_MARK = "given up"


def acquire_worker_lock(lock_file: TextIO) -> bool:
    """Take a job's lock and write down who has it, for as long as the file is open; False if it was given up."""
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if lock_file.read() == REVOKED_MARK:
        return False
    lock_file.write(str(os.getpid()))
    lock_file.flush()
    return True


def revoke_worker_lock(lock_file: TextIO) -> bool:
    """See to it that a job's process does nothing any more; False if it lives and is at work."""
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    lock_file.seek(0)
    lock_file.truncate()
    lock_file.write(REVOKED_MARK)
    lock_file.flush()
    fcntl.flock(lock_file, fcntl.LOCK_UN)
    return True
