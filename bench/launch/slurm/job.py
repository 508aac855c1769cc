"""What each task of a SLURM job does: watch over one rank; the first task leads and writes the rows."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import records
from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError
from bench.hardware import refuse_unsupported
from bench.hardware.detect import detect_device
from bench.launch.attempt import (
    Attempt,
    describe_outcome,
    get_user_name,
    is_process_alive,
    print_safely,
    write_lost_row,
    write_with_retries,
)
from bench.launch.ranks import RankExit, RendezvousServer, StopSignal, find_address_towards, preload_for_ranks
from bench.launch.slurm import job_end, queue
from bench.launch.slurm.coordination import LeaderLostError, RankCoordinator, publish_address, wait_for_address
from bench.launch.slurm.job_environment import SlurmJobEnvironment, SlurmStopSignal
from bench.launch.task import LaunchTask, search_largest_batch
from bench.records import Claim, Record, RunClaimedError
from bench.records.schema import FINISHED_STATUSES
from bench.tracking import NO_TRACKER, Tracker, TrackerClient

TIME_LIMIT_RESERVE_S = 60.0
"""Of a job's time limit, kept for starting and for writing the row; of short limits a quarter."""

STATUS_BY_STOP_REASON = {"time limit": "timeout", "node failure": "error", "unknown": "error"}
"""Statuses of runs that a signal ended, by its cause; `preempted` for all others."""

RENDEZVOUS_LOST_ERROR = "the store in which its ranks find each other was killed"


@dataclass(frozen=True)
class SlurmJob:
    """The callable that submitit runs in every task of a job."""

    task: LaunchTask
    attempts_before: int
    """Attempts recorded when the job was submitted: later ones come of the job itself, or of another."""
    store: Path
    job_folder: Path
    """Where the job's processes leave word for each other."""
    sweep: str
    time_limit_s: float
    start_timeout_s: float
    requeue: bool
    submission_info: dict[str, Any]
    """What the row says of the submission."""
    check_nodes: bool = False
    """Check every node before a run."""
    tracker: Tracker = NO_TRACKER
    """Where attempts are sent when the job is done."""

    def __call__(self) -> None:
        """Take part in the job until it is done."""
        job_environment = SlurmJobEnvironment.from_environment()
        ends_at = time.monotonic() + self.time_limit_s
        deadline = ends_at - min(TIME_LIMIT_RESERVE_S, self.time_limit_s / 4)
        # Every start of a job has a file of its own, for processes of an earlier one may linger.
        address_path = self.job_folder / f"meeting-{job_environment.job_id}-{job_environment.restart_count}.json"
        with SlurmStopSignal(job_environment, ends_at) as stop:
            config = self.task.config
            preload_for_ranks(config)
            if job_environment.coordinates.rank == 0:
                self._run_leader(job_environment, address_path, stop, deadline)
            else:
                self._run_follower(job_environment, address_path)

    def _run_leader(
        self, job_environment: SlurmJobEnvironment, address_path: Path, stop: SlurmStopSignal, deadline: float
    ) -> None:
        with RendezvousServer(find_address_towards(job_environment.nodes[1:])) as rendezvous_server:
            try:
                coordinator = RankCoordinator(
                    job_environment.coordinates,
                    rendezvous_server.host,
                    rendezvous_server.port,
                    check_nodes=self.check_nodes,
                )
                leader = JobLeader(self, job_environment, coordinator, stop, deadline)
                try:
                    publish_address(address_path, rendezvous_server.host, rendezvous_server.port)
                    leader.execute_task()
                except OSError as error:
                    print_safely(f"the store cannot be written: {error}")
                    leader.shut_down_others()
                    os._exit(job_end.UNWRITABLE_EXIT_CODE)
            except LeaderLostError:
                sys.exit(RENDEZVOUS_LOST_ERROR)

    def _run_follower(self, job_environment: SlurmJobEnvironment, address_path: Path) -> None:
        try:
            leader_address = wait_for_address(address_path, self.start_timeout_s)
            coordinator = RankCoordinator(job_environment.coordinates, *leader_address, check_nodes=self.check_nodes)
            while (next_run := coordinator.receive_next_run()) is not None:
                config = self.task.config.resize_batch(next_run["batch_size"])
                row_path = records.get_row_path(self.store, config.run_id, next_run["attempt"])
                # Signals reach every process of a job; what they mean the leader decides for all.
                coordinator.execute_run(
                    config,
                    StopSignal(),
                    math.inf,
                    row_path.with_suffix(".trace.json.gz"),
                    self.build_log_path(row_path, job_environment),
                )
        except LeaderLostError as error:
            sys.exit(f"rank {job_environment.coordinates.rank}: {error}")

    @staticmethod
    def build_log_path(row_path: Path, job_environment: SlurmJobEnvironment) -> Path:
        """Where a rank's output goes: a file beside the row, one for each node."""
        return row_path.with_suffix(
            ".log" if len(job_environment.nodes) == 1 else f".node{job_environment.node_index}.log"
        )


@dataclass
class JobLeader:
    """The first task of a job: decides what is run, and writes the rows."""

    job: SlurmJob
    job_environment: SlurmJobEnvironment
    coordinator: RankCoordinator
    stop: SlurmStopSignal
    deadline: float
    has_missing_ranks: bool = False
    """Some of the processes did not come up."""
    run_ids: list[str] = field(default_factory=list)
    """Runs that have come to a row."""

    def execute_task(self) -> None:
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
            search_largest_batch(task.config, self._attempt_run)
        else:
            self._attempt_run(task.config)
        self.shut_down_others()
        if self.stop.received and self.job.requeue and self.stop.find_stop_reason()[0] == "preempted":
            self._requeue_job()
        tracker_client = TrackerClient(
            self.job.tracker, self.job.store, print_safely, is_stopping=lambda: self.stop.received is not None
        )
        tracker_client.send_runs(
            self.run_ids
        )  # of a job that is killed meanwhile the next attempt sends what is missing

    def shut_down_others(self) -> None:
        """Let the others go; those that are still starting too, unless there is no time for it, or no hope."""
        self.coordinator.shut_down(0.0 if self.stop.received or self.has_missing_ranks else self.job.start_timeout_s)

    def _attempt_run(self, config: RunConfig) -> Record | None:
        """Execute a run unless it is recorded; None if there is nothing to be had."""
        if self.stop.received:
            return None
        record = records.read_latest_row(self.job.store, config.run_id)
        if record is not None and record["status"] in FINISHED_STATUSES:
            is_newer = record["attempt"] >= self.job.attempts_before
            if is_newer or not self.job.task.force:
                print_safely(f"{config.label}: recorded already, {record['status']}")
                return record
        attempt = self._claim_run(config)
        if attempt is None:
            return None
        attempt.note_concurrent_runs(ignore_interval=True)
        try:
            record = self._execute_claimed_run(config, attempt)
        except LeaderLostError:
            if self.stop.received:
                self._finish_stopped_attempt(attempt, [])
            else:
                attempt.finish([], {"status": "error", "error": RENDEZVOUS_LOST_ERROR})
            raise
        self.run_ids.append(config.run_id)
        print_safely(f"{config.label}: {record['status']}, {describe_outcome(record)}")
        return record

    def _claim_run(self, config: RunConfig) -> Attempt | None:
        launch_columns = {
            "launcher": "slurm",
            "job_id": self.job_environment.job_id,
            "sweep": self.job.sweep,
            "hosts": ",".join(self.job_environment.nodes),
        }
        while True:
            try:
                attempt = Attempt.begin(
                    config,
                    self.job.store,
                    self.job_environment.claim_owner,
                    launch_columns,
                    slurm_environment=self._describe_slurm_job(),
                )
            except RunClaimedError as error:
                if self._is_owner_alive(error.claim):
                    print_safely(f"{config.label}: left to {error.claim.owner}, who is executing it")
                    return None
                write_with_retries(lambda claim=error.claim: self._write_dead_owner_row(claim))  # type: ignore[misc]
            else:
                return attempt

    def _execute_claimed_run(self, config: RunConfig, attempt: Attempt) -> Record:
        """Execute a claimed run with everybody, and write its row."""
        try:
            device = detect_device()
            refuse_unsupported(config.hardware, device, config.precision, compiling_setting=config.compiling_setting)
            for remark in device.messages:
                print_safely(f"{self.job_environment.nodes[0]}: {remark}")
            if config.hardware.device != "cpu":
                refuse_too_few_visible_gpus(
                    device.count, config.devices_per_process, self.job_environment.tasks_per_node
                )
        except ImpossibleError as error:
            return attempt.finish([], {"status": "error", "error": f"{self.job_environment.nodes[0]}: {error}"})
        missing_ranks = self.coordinator.wait_until_joined(self.job.start_timeout_s, self.stop)
        if missing_ranks and not self.stop.received:
            self.has_missing_ranks = True
            rank_names = ", ".join(str(rank) for rank in missing_ranks[:8]) + (
                ", ..." if len(missing_ranks) > 8 else ""
            )
            message = (
                f"{len(missing_ranks)} of {self.job_environment.coordinates.world_size} processes did not come up: "
                f"ranks {rank_names}"
            )
            return attempt.finish([], {"status": "error", "error": message})
        if self.stop.received:
            return self._finish_stopped_attempt(attempt, [])
        self.coordinator.send_next_run({"batch_size": config.batch_size_per_gpu, "attempt": attempt.claim.attempt})
        run_exit = self.coordinator.execute_run(
            config,
            self.stop,
            self.deadline,
            attempt.trace_path,
            self.job.build_log_path(attempt.row_path, self.job_environment),
            attempt.note_concurrent_runs,
        )
        assert run_exit is not None
        if run_exit.end_reason == "stopped":
            return self._finish_stopped_attempt(attempt, run_exit.rank_exits)
        if run_exit.end_reason == "timeout":
            message = f"not finished after {self.job.time_limit_s / 60:g} min, its job's time limit"
            return attempt.finish(run_exit.rank_exits, {"status": "timeout", "error": message})
        return attempt.finish(run_exit.rank_exits)

    def _finish_stopped_attempt(self, attempt: Attempt, rank_exits: list[RankExit]) -> Record:
        reason, message = self.stop.find_stop_reason()
        status = STATUS_BY_STOP_REASON.get(reason, "preempted")
        return attempt.finish(rank_exits, {"status": status, "error": f"stopped by {self.stop.received}: {message}"})

    def _is_owner_alive(self, claim: Claim) -> bool:
        """Whether whoever holds a claim still executes the run."""
        if "process" in claim.owner:
            return is_process_alive(claim.owner["process"])
        if claim.owner["job"] == self.job_environment.job_id:
            return bool(claim.owner["restart"] == self.job_environment.restart_count)
        try:
            return job_end.is_job_alive(
                claim.owner["job"], is_own=claim.owner.get("user", get_user_name()) == get_user_name()
            )
        except queue.SlurmError:
            return True

    def _write_dead_owner_row(self, claim: Claim) -> None:
        """Write the row of an attempt that its owner did not live to finish."""
        if "process" in claim.owner:
            write_lost_row(claim, status="error", error="its job was killed or crashed")
        else:
            write_lost_row(claim, **job_end.find_exit_record(claim.owner))

    def _requeue_job(self) -> None:
        """Ask SLURM for another start of this job: with its signal handled, it would count as completed."""
        try:
            queue.requeue_job(self.job_environment.job_id)
        except queue.SlurmError as error:
            print_safely(f"cannot be requeued: {error}")

    def _describe_slurm_job(self) -> dict[str, Any]:
        variable_names = ("PARTITION", "ACCOUNT", "QOS", "NODELIST", "CPUS_PER_NODE", "GPUS", "NAME")
        return {
            **self.job.submission_info,
            "job_id": self.job_environment.job_id,
            "restart": self.job_environment.restart_count,
            "tasks_per_node": self.job_environment.tasks_per_node,
            **{name.lower(): os.environ.get(f"SLURM_JOB_{name}") for name in variable_names},
            "on_the_same_nodes": queue.list_other_jobs(self.job_environment.job_id, self.job_environment.nodes),
        }


def refuse_too_few_visible_gpus(num_visible: int, gpus_per_task: int, tasks_per_node: int) -> None:
    """Raise `ImpossibleError` unless a task sees just the GPUs that it drives, or enough for all tasks of its node.

    It may see more than these: all of a node's, where nothing is asked for and the node is its job's alone.
    """
    if num_visible != gpus_per_task and num_visible < gpus_per_task * tasks_per_node:
        raise ImpossibleError(
            f"{num_visible} GPUs are visible to {tasks_per_node} tasks, each of which drives {gpus_per_task}."
        )
