"""Launch on this machine: one submitit job works through the runs, one at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import submitit

from bench import records
from bench.config.run_config import RunConfig
from bench.core import files, processes
from bench.hardware.detect import DetectedDevice
from bench.launch.attempt import write_lost_row, write_unstarted_row
from bench.launch.ranks import StopSignal
from bench.launch.run_on_host import check_run_on_host, load_local_profile
from bench.launch.task import LaunchTask
from bench.launch.worker import Worker, WorkerEvent, revoke_worker_lock
from bench.rank.row import build_configured_columns
from bench.records import claims
from bench.tracking import NO_TRACKER, Tracker

POLL_INTERVAL_S = 0.1

STOP_RETRY_INTERVAL_S = 1.0
"""How long a job that was asked to stop has until it is asked again: while it starts, it may not listen."""

JOB_TIME_LIMIT_MIN = 60 * 24 * 365
"""Each run has a time limit of its own, so the job needs none."""


class LocalLauncher:
    """Executes runs on this machine through submitit's local executor.

    Parameters
    ----------
    cluster: dict
        Values of ``conf/cluster/local.yaml``.
    device: Device
        This machine's device.
    """

    def __init__(self, cluster: dict[str, Any], device: DetectedDevice) -> None:
        self._profile = load_local_profile(cluster)
        self._device = device

    def check(self, config: RunConfig) -> None:
        """Raise `ImpossibleError` where this machine cannot execute a run."""
        check_run_on_host(config, self._profile, self._device)

    def launch(
        self,
        tasks: list[LaunchTask],
        store: Path,
        sweep: str,
        stop: StopSignal,
        on_event: Callable[[WorkerEvent], None],
        time_budget_s: float | None = None,
        tracker: Tracker = NO_TRACKER,
    ) -> bool:
        """Execute tasks in order until all are done, `stop` comes, or the time budget does not suffice for the next.

        The job goes on with its current run, and no further, if this process is killed.

        Parameters
        ----------
        on_event: callable
            Told as runs start and end.
        tracker: Tracker
            Where attempts are sent, each before the next run starts.

        Returns
        -------
        bool
            Whether the time did not suffice.
        """
        remaining_tasks = list(tasks)
        deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
        while remaining_tasks and not stop.received:
            num_finished = self._launch_job(remaining_tasks, store, sweep, stop, on_event, deadline, tracker)
            if num_finished is None:
                return True
            remaining_tasks = remaining_tasks[num_finished:]
        return False

    def _launch_job(
        self,
        tasks: list[LaunchTask],
        store: Path,
        sweep: str,
        stop: StopSignal,
        on_event: Callable[[WorkerEvent], None],
        deadline: float | None,
        tracker: Tracker,
    ) -> int | None:
        """Submit one job for the tasks and follow it to its end.

        Returns
        -------
        int or None
            How many tasks are over; None if the time does not suffice for the next one.
        """
        job_folder = store / ".jobs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{len(tasks)}"
        files.make_folder(job_folder)
        events_path = job_folder / "events.jsonl"
        events_path.touch()
        executor = submitit.LocalExecutor(job_folder)
        executor.update_parameters(timeout_min=JOB_TIME_LIMIT_MIN, tasks_per_node=1, stderr_to_stdout=True)
        worker = Worker(
            tasks=tasks,
            store=store.resolve(),
            sweep=sweep,
            time_limit_s=self._profile.time_limit_s,
            events_path=events_path.resolve(),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            deadline=deadline,
            tracker=tracker,
        )
        num_finished, has_events, out_of_time, has_unkillable_rank = 0, False, False, False
        start_event: WorkerEvent | None = None
        with (
            _hold_lock(worker.sweep_lock_path),
            events_path.open() as events_file,
            files.open_lock(worker.worker_lock_path) as worker_lock_file,
        ):
            with processes.block_signals(signal.SIGINT):
                job = executor.submit(worker)
            stop_sent_at_s = -math.inf
            while True:
                # submitit's controller may die before the process that works: the job is over when both are gone.
                is_job_over = job.done() and revoke_worker_lock(worker_lock_file)
                for event in _read_new_events(events_file):
                    has_events = True
                    start_event = event if event["event"] == "start" else None
                    num_finished += event["event"] == "task done"
                    out_of_time = out_of_time or event["event"] == "out of time"
                    has_unkillable_rank = has_unkillable_rank or event["event"] == "stuck"
                    on_event(event)
                if is_job_over or has_unkillable_rank:
                    break
                if stop.received and time.monotonic() - stop_sent_at_s > STOP_RETRY_INTERVAL_S:
                    _send_stop_signal(job, worker.worker_lock_path)
                    stop_sent_at_s = time.monotonic()
                time.sleep(POLL_INTERVAL_S)
        if has_unkillable_rank:
            return len(tasks)
        if num_finished == len(tasks) or out_of_time:
            shutil.rmtree(job_folder)
            return None if out_of_time else num_finished
        if not stop.received:
            # The job itself died: what it was at cannot be blamed on the run after it.
            error = f"its job was killed or crashed. {_describe_last_output(job)}"
            config = tasks[num_finished].config
            if start_event is not None:  # in a search, runs have a batch size of their own
                config = config.resize_batch(start_event["batch_size"])
                error += _write_lost_run_row(config, store, sweep, error, start_event["attempt"])
            on_event({"event": "lost", "label": config.label, "error": error})
            # A job that never came to a run would not do so with the next one either.
            num_finished = num_finished + 1 if has_events else len(tasks)
        return num_finished


def _write_lost_run_row(config: RunConfig, store: Path, sweep: str, error: str, attempt: int) -> str:
    """Write the row of a run whose job died; returns what to add to the message.

    Parameters
    ----------
    attempt: int
        Number of the attempt that the job had begun. If it has a row, the job died after it was written.
    """
    try:
        latest_row = records.read_latest_row(store, config.run_id)
        if latest_row is not None and latest_row["attempt"] >= attempt:
            return " Its row had been written."
        claim = claims.find_claim(store, config.run_id)
        if claim is not None and "process" not in claim.owner:
            return " A job has the run by now."
        if claim is not None:
            write_lost_row(claim, status="error", error=error)
        else:
            launch_columns = {"launcher": "local", "sweep": sweep}
            write_unstarted_row(
                build_configured_columns(config), store, status="error", error=error, launch_columns=launch_columns
            )
    except OSError as write_error:
        return f" Its row could not be written: {write_error}"
    return ""


def _read_new_events(events_file: Any) -> Iterator[WorkerEvent]:
    while True:
        position = events_file.tell()
        line = events_file.readline()
        if not line.endswith("\n"):
            events_file.seek(position)
            return
        yield json.loads(line)


def _send_stop_signal(job: submitit.Job[Any], worker_lock_path: Path) -> None:
    """Send SIGTERM, which the controller passes on, or its process itself, which may outlive it.

    `job.cancel` would have the task killed before it wrote its row.
    """
    process_id = worker_lock_path.read_text() if job.done() else str(job.job_id)
    with contextlib.suppress(ProcessLookupError):
        if process_id.isdecimal():
            os.kill(int(process_id), signal.SIGTERM)


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold a file's lock, which is gone when this process is."""
    with files.open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _describe_last_output(job: submitit.Job[Any]) -> str:
    output_lines = (job.stdout() or "").strip().splitlines()
    return f"The last of {job.paths.stdout}: {output_lines[-1] if output_lines else 'nothing'}"
