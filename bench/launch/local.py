"""Launch on this machine: one submitit job works through the runs, one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import submitit

from bench import processes, records
from bench.config import RunConfig
from bench.errors import ImpossibleError, bad_value
from bench.hardware import refuse_unsupported
from bench.hardware.detect import Device
from bench.launch.attempt import write_lost_row, write_unstarted_row
from bench.launch.capacity import refuse_what_exhausts_this_machine
from bench.launch.stop import StopSignal
from bench.launch.task import Task
from bench.launch.worker import Event, Worker, give_up
from bench.records import claims, sharing
from bench.row import configured_row
from bench.tracking import NO_TRACKER, Tracker
from bench.typed import Within, typed

POLL_S = 0.1

ASK_AGAIN_S = 1.0
"""How long a job that was asked to stop has until it is asked again: while it starts, it may not listen."""

FOREVER_MIN = 60 * 24 * 365
"""Each run has a time limit of its own, so the job needs none."""


@dataclass(frozen=True)
class LocalProfile:
    """The fields of ``conf/cluster/local.yaml``."""

    name: str
    launcher: str
    gpus_per_node: Annotated[int, Within(1, 2**17)]
    max_cpu_processes: Annotated[int, Within(1, 4096)]
    time_limit_s: Annotated[float, Within(1, 1e8, unit="seconds")]
    hardware: str | None = None
    """Option of conf/hardware that `hardware=auto` means; null for what this machine has."""


class LocalLauncher:
    """Executes runs on this machine through submitit's local executor.

    Parameters
    ----------
    cluster: dict
        Values of ``conf/cluster/local.yaml``.
    device: Device
        This machine's device.
    """

    def __init__(self, cluster: dict[str, Any], device: Device) -> None:
        if cluster.get("launcher") != "local":
            raise bad_value("cluster.launcher", cluster.get("launcher"), ["local"])
        self._cluster: LocalProfile = typed("cluster", LocalProfile, cluster)
        self._device = device

    def check(self, config: RunConfig) -> None:
        """Raise `ImpossibleError` where this machine cannot execute a run."""
        config.strategy.check_installed()
        refuse_unsupported(config.hardware, self._device, config.precision, compile_blocks=config.compile)
        if config.machines > 1:
            raise ImpossibleError(
                f"gpus={config.gpus} needs {config.nodes} machines of {config.gpus_per_node} GPUs, and cluster=local "
                f"is one: choose at most {config.gpus_per_node}."
            )
        if config.hardware.device == "cuda" and config.devices > self._device.count:
            raise ImpossibleError(
                f"gpus={config.gpus} is more than the {self._device.count} GPU(s) of this machine: "
                f"choose at most {self._device.count}, or hardware=cpu."
            )
        if config.hardware.device == "cpu" and config.processes > self._cluster.max_cpu_processes:
            raise ImpossibleError(
                f"gpus={config.gpus} is more than the {self._cluster.max_cpu_processes} processes this machine runs "
                "on its CPU: choose fewer, or raise cluster.max_cpu_processes."
            )
        if config.hardware.device == "cpu":
            refuse_what_exhausts_this_machine(config)

    def launch(
        self,
        tasks: list[Task],
        store: Path,
        sweep: str,
        stop: StopSignal,
        on_event: Callable[[Event], None],
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
        remaining = list(tasks)
        deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
        while remaining and not stop.received:
            finished = self._launch_job(remaining, store, sweep, stop, on_event, deadline, tracker)
            if finished is None:
                return True
            remaining = remaining[finished:]
        return False

    def _launch_job(
        self,
        tasks: list[Task],
        store: Path,
        sweep: str,
        stop: StopSignal,
        on_event: Callable[[Event], None],
        deadline: float | None,
        tracker: Tracker,
    ) -> int | None:
        """Submit one job for the tasks and follow it to its end.

        Returns
        -------
        int or None
            How many tasks are over; None if the time does not suffice for the next one.
        """
        folder = store / ".jobs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{len(tasks)}"
        sharing.make_folder(folder)
        events = folder / "events.jsonl"
        events.touch()
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=FOREVER_MIN, tasks_per_node=1, stderr_to_stdout=True)
        worker = Worker(
            tasks=tasks,
            store=store.resolve(),
            sweep=sweep,
            time_limit_s=self._cluster.time_limit_s,
            events=events.resolve(),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            deadline=deadline,
            tracker=tracker,
        )
        finished, heard, out_of_time, stuck = 0, False, False, False
        current: Event | None = None
        with _hold(worker.alive_file), events.open() as stream, sharing.open_lock(worker.own_file) as own_file:
            with processes.signals_held(signal.SIGINT):
                job = executor.submit(worker)
            asked_to_stop = -math.inf
            while True:
                # submitit's controller may die before the process that works: the job is over when both are gone.
                over = job.done() and give_up(own_file)
                for event in _new_events(stream):
                    heard = True
                    current = event if event["event"] == "start" else None
                    finished += event["event"] == "task done"
                    out_of_time = out_of_time or event["event"] == "out of time"
                    stuck = stuck or event["event"] == "stuck"
                    on_event(event)
                if over or stuck:
                    break
                if stop.received and time.monotonic() - asked_to_stop > ASK_AGAIN_S:
                    _ask_to_stop(job, worker.own_file)
                    asked_to_stop = time.monotonic()
                time.sleep(POLL_S)
        if stuck:
            return len(tasks)
        if finished == len(tasks) or out_of_time:
            shutil.rmtree(folder)
            return None if out_of_time else finished
        if not stop.received:
            # The job itself died: what it was at cannot be blamed on the run after it.
            error = f"its job was killed or crashed. {_last_words(job)}"
            config = tasks[finished].config
            if current is not None:  # in a search, runs have a batch size of their own
                config = dataclasses.replace(config, batch_size_per_gpu=current["batch_size"])
                error += _write_down(config, store, sweep, error, current["attempt"])
            on_event({"event": "lost", "label": config.label, "error": error})
            # A job that never came to a run would not do so with the next one either.
            finished = finished + 1 if heard else len(tasks)
        return finished


def _write_down(config: RunConfig, store: Path, sweep: str, error: str, attempt: int) -> str:
    """Write the row of a run whose job died; returns what to add to the message.

    Parameters
    ----------
    attempt: int
        Number of the attempt that the job had begun. If it has a row, the job died after it was written.
    """
    try:
        found = records.latest(store, config.run_id)
        if found is not None and found["attempt"] >= attempt:
            return " Its row had been written."
        claim = claims.held(store, config.run_id)
        if claim is not None and "process" not in claim.owner:
            return " A job has the run by now."
        if claim is not None:
            write_lost_row(claim, status="error", error=error)
        else:
            facts = {"launcher": "local", "sweep": sweep}
            write_unstarted_row(configured_row(config), store, status="error", error=error, facts=facts)
    except OSError as unwritable:
        return f" Its row could not be written: {unwritable}"
    return ""


def _new_events(stream: Any) -> Iterator[Event]:
    while True:
        position = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(position)
            return
        yield json.loads(line)


def _ask_to_stop(job: submitit.Job[Any], own_file: Path) -> None:
    """Send SIGTERM, which the controller passes on, or its process itself, which may outlive it.

    `job.cancel` would have the task killed before it wrote its row.
    """
    name = own_file.read_text() if job.done() else str(job.job_id)
    with contextlib.suppress(ProcessLookupError):
        if name.isdecimal():
            os.kill(int(name), signal.SIGTERM)


@contextlib.contextmanager
def _hold(path: Path) -> Iterator[None]:
    """Hold a file's lock, which is gone when this process is."""
    with sharing.open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_words(job: submitit.Job[Any]) -> str:
    text = (job.stdout() or "").strip().splitlines()
    return f"The last of {job.paths.stdout}: {text[-1] if text else 'nothing'}"
