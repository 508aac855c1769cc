"""The job that works through tasks on one machine: what submitit starts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench import records
from bench.config import RunConfig
from bench.launch.host import StuckError, execute
from bench.launch.stop import StopSignal
from bench.launch.task import Task, largest_batch
from bench.launch.verdict import describe
from bench.records import Record, TakenError, sharing
from bench.records.schema import FINISHED
from bench.tracking import NO_TRACKER, Courier, Tracker

Event = dict[str, Any]

POLL_S = 0.25


@dataclass(frozen=True)
class Worker:
    """Executes tasks one after the other. Called in a process of its own."""

    tasks: list[Task]
    store: Path
    sweep: str
    time_limit_s: float
    events: Path
    """File that events are appended to, one JSON object a line."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES of whoever asked, which submitit's local executor overwrites."""
    deadline: float | None = None
    """On `time.monotonic`, which all processes of a machine share: no run but the first is started that is expected to
    end later."""
    tracker: Tracker = NO_TRACKER
    """Where attempts are sent, each before the next run starts."""

    @property
    def alive_file(self) -> Path:
        """Locked by the sweep for as long as it lives."""
        return self.events.with_name("sweep-alive")

    @property
    def own_file(self) -> Path:
        """Locked by this job's process for as long as it or a rank of it lives; names it."""
        return self.events.with_name("worker-alive")

    def __call__(self) -> None:
        """Work through the tasks until they are done, a signal comes, or the sweep is gone.

        Does nothing if the sweep has given this job up already.
        """
        with sharing.open_lock(self.own_file) as file:
            if begin(file):
                try:
                    self._work()
                except StuckError as error:
                    self._tell(event="stuck", label=error.label, error=str(error))

    def _work(self) -> None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if self.visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible_devices
        with StopSignal() as stop:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back since before this process began
            started, out_of_time = 0, False
            courier = Courier(
                self.tracker,
                self.store,
                lambda line: self._tell(event="tracking", text=line, offline=courier.offline, failure=courier.failure),
                hurry=lambda: stop.received is not None,
            )

            def attempt(config: RunConfig) -> Record | None:
                nonlocal started, out_of_time
                if self._must_end(stop):
                    return None
                record = records.latest(self.store, config.run_id)
                if record is not None and record["status"] in FINISHED and not task.force:
                    return record
                if started and self.deadline is not None and time.monotonic() + task.expected_s > self.deadline:
                    out_of_time = True
                    return None
                started += 1
                record = self._run(config, task.force, stop)
                if record is not None:
                    courier.send_runs([config.run_id])
                return record

            for task in self.tasks:
                if task.search:
                    largest_batch(task.config, attempt)
                else:
                    attempt(task.config)
                if out_of_time:
                    self._tell(event="out of time")
                if out_of_time or self._must_end(stop):
                    return
                self._tell(event="task done")

    def _must_end(self, stop: StopSignal) -> bool:
        return stop.received is not None or self._sweep_is_gone()

    def _run(self, config: RunConfig, force: bool, stop: StopSignal) -> Record | None:
        """Execute a run unless it is recorded, or another sweep just executed it; None if a signal came first."""
        with turn(self.store, config.run_id, stop) as waited:
            if stop.received:
                return None
            record = records.latest(self.store, config.run_id)
            if record is None or record["status"] not in FINISHED or (force and not waited):
                self._tell(
                    event="start",
                    label=config.label,
                    batch_size=config.batch_size_per_gpu,
                    attempt=records.next_attempt(self.store, config.run_id),
                )
                try:
                    record = execute(
                        config,
                        self.store,
                        launcher="local",
                        sweep=self.sweep,
                        time_limit_s=self.time_limit_s,
                        stop=stop,
                        log=True,
                    )
                except TakenError as taken:
                    self._tell(event="taken", label=config.label, by=taken.claim.row.get("job_id"))
                    return None
            status, summary = record["status"], describe(record)
            self._tell(event="end", run_id=config.run_id, label=config.label, status=status, summary=summary)
            return record

    def _tell(self, **event: Any) -> None:
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def _sweep_is_gone(self) -> bool:
        with self.alive_file.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


GIVEN_UP = "given up"


def begin(file: TextIO) -> bool:
    """Take a job's lock and write down who has it, for as long as the file is open; False if it was given up."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if file.read() == GIVEN_UP:
        return False
    file.write(str(os.getpid()))
    file.flush()
    return True


def give_up(file: TextIO) -> bool:
    """See to it that a job's process does nothing any more; False if it lives and is at work."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    file.seek(0)
    file.truncate()
    file.write(GIVEN_UP)
    file.flush()
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


@contextlib.contextmanager
def turn(store: Path, run_id: str, stop: StopSignal) -> Iterator[bool]:
    """Hold a run's lock, however long another sweep has it, unless a signal comes; tells whether it had to wait."""
    waited = False
    while True:
        with records.lock(store, run_id, blocking=False) as held:
            if held or stop.received:
                yield waited
                return
        waited = True
        time.sleep(POLL_S)
