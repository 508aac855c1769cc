"""What each task of a SLURM job does: watch over one rank; the first task leads and writes the rows."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import processes, records
from bench.config import RunConfig
from bench.errors import ImpossibleError
from bench.hardware import refuse_unsupported
from bench.hardware.detect import detect
from bench.launch.attempt import Attempt, persistently, say, write_lost_row
from bench.launch.meeting import MeetingPoint
from bench.launch.owners import process_lives, this_user
from bench.launch.ranks import Ended
from bench.launch.slurm import endings, queue
from bench.launch.slurm.crew import Crew, LeaderLostError, find_address, publish_address
from bench.launch.slurm.place import JobPlace, JobSignal
from bench.launch.stop import StopSignal
from bench.launch.task import Task, largest_batch
from bench.launch.verdict import describe
from bench.records import Claim, Record, TakenError
from bench.records.schema import FINISHED
from bench.rendezvous import address_towards
from bench.tracking import NO_TRACKER, Courier, Tracker

RESERVE_S = 60.0
"""Of a job's time limit, kept for starting and for writing the row; of short limits a quarter."""

STATUS_OF_CAUSE = {"time limit": "timeout", "node failure": "error", "unknown": "error"}
"""Statuses of runs that a signal ended, by its cause; `preempted` for all others."""

STORE_LOST = "the store in which its ranks find each other was killed"


@dataclass(frozen=True)
class SlurmJob:
    """The callable that submitit runs in every task of a job."""

    task: Task
    attempts_before: int
    """Attempts recorded when the job was submitted: later ones come of the job itself, or of another."""
    store: Path
    folder: Path
    """Where the job's processes leave word for each other."""
    sweep: str
    time_limit_s: float
    start_timeout_s: float
    requeue: bool
    facts: dict[str, Any]
    """What the row says of the submission."""
    check_nodes: bool = False
    """Check every node before a run."""
    tracker: Tracker = NO_TRACKER
    """Where attempts are sent when the job is done."""

    def __call__(self) -> None:
        """Take part in the job until it is done."""
        place = JobPlace.from_environment()
        ends_at = time.monotonic() + self.time_limit_s
        deadline = ends_at - min(RESERVE_S, self.time_limit_s / 4)
        # Every start of a job has a file of its own, for processes of an earlier one may linger.
        address = self.folder / f"meeting-{place.job_id}-{place.restart}.json"
        with JobSignal(place, ends_at) as stop:
            config = self.task.config
            processes.prepare(config.imports)
            if place.rank.rank == 0:
                self._lead(place, address, stop, deadline)
            else:
                self._follow(place, address)

    def _lead(self, place: JobPlace, address: Path, stop: JobSignal, deadline: float) -> None:
        with MeetingPoint(address_towards(place.nodes[1:])) as meeting:
            try:
                crew = Crew(place.rank, meeting.host, meeting.port, check_nodes=self.check_nodes)
                leader = Leader(self, place, crew, stop, deadline)
                try:
                    publish_address(address, meeting.host, meeting.port)
                    leader.lead()
                except OSError as error:
                    say(f"the store cannot be written: {error}")
                    leader.dismiss()
                    os._exit(endings.UNWRITABLE)
            except LeaderLostError:
                sys.exit(STORE_LOST)

    def _follow(self, place: JobPlace, address: Path) -> None:
        try:
            leader = find_address(address, self.start_timeout_s)
            crew = Crew(place.rank, *leader, check_nodes=self.check_nodes)
            while (order := crew.next_order()) is not None:
                config = dataclasses.replace(self.task.config, batch_size_per_gpu=order["batch_size"])
                row = records.row_path(self.store, config.run_id, order["attempt"])
                # Signals reach every process of a job; what they mean the leader decides for all.
                crew.run(config, StopSignal(), math.inf, row.with_suffix(".trace.json.gz"), self.log(row, place))
        except LeaderLostError as error:
            sys.exit(f"rank {place.rank.rank}: {error}")

    @staticmethod
    def log(row: Path, place: JobPlace) -> Path:
        """Where a rank's output goes: a file beside the row, one for each node."""
        return row.with_suffix(".log" if len(place.nodes) == 1 else f".node{place.node}.log")


@dataclass
class Leader:
    """The first task of a job: decides what is run, and writes the rows."""

    job: SlurmJob
    place: JobPlace
    crew: Crew
    stop: JobSignal
    deadline: float
    incomplete: bool = False
    """Some of the processes did not come up."""
    run_ids: list[str] = field(default_factory=list)
    """Runs that have come to a row."""

    def lead(self) -> None:
        """Work through the job's task, then let the others go.

        Raises
        ------
        OSError
            If the store cannot be written.
        LeaderLostError
            If the key-value store is gone; the run's row is written.
        """
        task = self.job.task
        if task.search:
            largest_batch(task.config, self._attempt)
        else:
            self._attempt(task.config)
        self.dismiss()
        if self.stop.received and self.job.requeue and self.stop.cause()[0] == "preempted":
            self._start_anew()
        courier = Courier(self.job.tracker, self.job.store, say, hurry=lambda: self.stop.received is not None)
        courier.send_runs(self.run_ids)  # of a job that is killed meanwhile the next attempt sends what is missing

    def dismiss(self) -> None:
        """Let the others go; those that are still starting too, unless there is no time for it, or no hope."""
        self.crew.dismiss(0.0 if self.stop.received or self.incomplete else self.job.start_timeout_s)

    def _attempt(self, config: RunConfig) -> Record | None:
        """Execute a run unless it is recorded; None if there is nothing to be had."""
        if self.stop.received:
            return None
        record = records.latest(self.job.store, config.run_id)
        if record is not None and record["status"] in FINISHED:
            newer = record["attempt"] >= self.job.attempts_before
            if newer or not self.job.task.force:
                say(f"{config.label}: recorded already, {record['status']}")
                return record
        attempt = self._begin(config)
        if attempt is None:
            return None
        attempt.look_around(at_once=True)
        try:
            record = self._execute(config, attempt)
        except LeaderLostError:
            if self.stop.received:
                self._finish_stopped(attempt, [])
            else:
                attempt.finish([], {"status": "error", "error": STORE_LOST})
            raise
        self.run_ids.append(config.run_id)
        say(f"{config.label}: {record['status']}, {describe(record)}")
        return record

    def _begin(self, config: RunConfig) -> Attempt | None:
        facts = {
            "launcher": "slurm",
            "job_id": self.place.job_id,
            "sweep": self.job.sweep,
            "hosts": ",".join(self.place.nodes),
        }
        while True:
            try:
                attempt = Attempt.begin(config, self.job.store, self.place.owner, facts, slurm=self._slurm_facts())
            except TakenError as taken:
                if self._lives(taken.claim):
                    say(f"{config.label}: left to {taken.claim.owner}, who is executing it")
                    return None
                persistently(lambda claim=taken.claim: self._bury(claim))  # type: ignore[misc]
            else:
                return attempt

    def _execute(self, config: RunConfig, attempt: Attempt) -> Record:
        """Execute a claimed run with everybody, and write its row."""
        try:
            device = detect()
            refuse_unsupported(config.hardware, device, config.precision, compile_blocks=config.compile)
            for remark in device.remarks:
                say(f"{self.place.nodes[0]}: {remark}")
            if config.hardware.device == "cuda":
                refuse_too_few_gpus(device.count, config.devices_per_process, self.place.tasks_per_node)
        except ImpossibleError as error:
            return attempt.finish([], {"status": "error", "error": f"{self.place.nodes[0]}: {error}"})
        missing = self.crew.missing(self.job.start_timeout_s, self.stop)
        if missing and not self.stop.received:
            self.incomplete = True
            names = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
            waited = f"{len(missing)} of {self.place.rank.world_size} processes did not come up: ranks {names}"
            return attempt.finish([], {"status": "error", "error": waited})
        if self.stop.received:
            return self._finish_stopped(attempt, [])
        self.crew.order({"batch_size": config.batch_size_per_gpu, "attempt": attempt.claim.attempt})
        ending = self.crew.run(
            config,
            self.stop,
            self.deadline,
            attempt.trace,
            self.job.log(attempt.path, self.place),
            attempt.look_around,
        )
        assert ending is not None
        if ending.how == "stopped":
            return self._finish_stopped(attempt, ending.ranks)
        if ending.how == "timeout":
            words = f"not finished after {self.job.time_limit_s / 60:g} min, its job's time limit"
            return attempt.finish(ending.ranks, {"status": "timeout", "error": words})
        return attempt.finish(ending.ranks)

    def _finish_stopped(self, attempt: Attempt, ranks: list[Ended]) -> Record:
        cause, words = self.stop.cause()
        status = STATUS_OF_CAUSE.get(cause, "preempted")
        return attempt.finish(ranks, {"status": status, "error": f"stopped by {self.stop.received}: {words}"})

    def _lives(self, claim: Claim) -> bool:
        """Whether whoever holds a claim still executes the run."""
        if "process" in claim.owner:
            return process_lives(claim.owner["process"])
        if claim.owner["job"] == self.place.job_id:
            return bool(claim.owner["restart"] == self.place.restart)
        try:
            return endings.lives(claim.owner["job"], own=claim.owner.get("user", this_user()) == this_user())
        except queue.SlurmError:
            return True

    def _bury(self, claim: Claim) -> None:
        """Write the row of an attempt that its owner did not live to finish."""
        if "process" in claim.owner:
            write_lost_row(claim, status="error", error="its job was killed or crashed")
        else:
            write_lost_row(claim, **endings.obituary(claim.owner))

    def _start_anew(self) -> None:
        """Ask SLURM for another start of this job: with its signal handled, it would count as completed."""
        try:
            queue.requeue(self.place.job_id)
        except queue.SlurmError as error:
            say(f"cannot be requeued: {error}")

    def _slurm_facts(self) -> dict[str, Any]:
        variables = ("PARTITION", "ACCOUNT", "QOS", "NODELIST", "CPUS_PER_NODE", "GPUS", "NAME")
        return {
            **self.job.facts,
            "job_id": self.place.job_id,
            "restart": self.place.restart,
            "tasks_per_node": self.place.tasks_per_node,
            **{name.lower(): os.environ.get(f"SLURM_JOB_{name}") for name in variables},
            "on_the_same_nodes": queue.neighbours(self.place.job_id, self.place.nodes),
        }


def refuse_too_few_gpus(visible: int, each: int, tasks: int) -> None:
    """Raise `ImpossibleError` unless a task sees just the GPUs that it drives, or enough for all tasks of its node.

    It may see more than these: all of a node's, where nothing is asked for and the node is its job's alone.
    """
    if visible != each and visible < each * tasks:
        raise ImpossibleError(f"{visible} GPUs are visible to {tasks} tasks, each of which drives {each}.")
