"""Launch on a SLURM cluster: group runs into job arrays and submit them; following them is for later."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission

from bench import records
from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError, UsageError, invalid_value_error
from bench.core.typed_config import build_dataclass
from bench.hardware import refuse_unsupported
from bench.hardware.detect import DetectedDevice
from bench.launch.ranks import StopSignal
from bench.launch.slurm import code_snapshot, queue, submissions
from bench.launch.slurm.job import SlurmJob
from bench.launch.slurm.profile import SlurmProfile, build_array_script, build_sbatch_script
from bench.launch.slurm.submissions import JobArray, Submission, SubmittedRun
from bench.launch.task import LaunchTask
from bench.planning.run_predictions import compute_time_limit_min, predict_duration_s
from bench.rank.row import build_configured_columns
from bench.records import Record, claims
from bench.tracking import NO_TRACKER, Tracker

JOB_NAME_PREFIX = "bench"

SCRIPT_FILE_NAME = "submission.sh"

PENDING_REASON_TIMEOUT_S = 3.0
"""How long SLURM may take to say why a job waits."""

CANCEL_TIMEOUT_S = 60.0
"""How long a cancelled job may take to be gone."""

DEFAULT_MAX_ARRAY_SIZE = 1001
"""SLURM's default, where there is no cluster to ask."""


JobShape = tuple[int, int, int]
"""Nodes, tasks on each, GPUs of each task."""


@dataclass(frozen=True)
class PlannedArray:
    """An array and its tasks, in the same order."""

    array: JobArray
    tasks: list[LaunchTask]


class SlurmLauncher:
    """Submits runs to SLURM through submitit.

    Parameters
    ----------
    cluster: dict
        Values of a file under conf/cluster whose launcher is `slurm`.
    dry_run: bool
        Plan without SLURM, too, where there is none.

    Raises
    ------
    UsageError
        If the values are not valid, or SLURM cannot be asked.
    """

    unchecked_reason: str | None = None
    """Why nothing was checked with SLURM, if nothing was."""

    def __init__(self, cluster: dict[str, Any], *, dry_run: bool) -> None:
        self.profile: SlurmProfile = build_dataclass("cluster", SlurmProfile, cluster)
        try:
            self._max_array_size = queue.query_max_array_size()
        except queue.SlurmError as error:
            if not dry_run:
                raise UsageError(f"cluster={self.profile.name} cannot be asked: {error}.") from None
            self._max_array_size, self.unchecked_reason = DEFAULT_MAX_ARRAY_SIZE, str(error)
        self._refusal_by_shape: dict[JobShape, str | None] = {}

    def exclude_bad_nodes(self, store: Path) -> list[str]:
        """Exclude the nodes whose last health check failed, if the cluster's file asks for that; returns them."""
        if not self.profile.exclude_bad or not store.is_dir():
            return []
        nodes = find_bad_nodes(records.read_all_attempts(store).records)
        self.profile = dataclasses.replace(self.profile, exclude=format_exclude_list(self.profile.exclude, nodes))
        return nodes

    def check(self, config: RunConfig) -> None:
        """Raise `ImpossibleError` where this cluster cannot execute a run."""
        config.strategy.check_installed()
        config.optimizer.check_installed()
        config.finetune.check_installed()
        if config.hardware.device == "cpu":
            node_cpu = DetectedDevice("cpu", "the nodes' processors", 0)
            refuse_unsupported(config.hardware, node_cpu, config.precision)
        if not config.is_rehearsed and config.gpus_per_node > self.profile.gpus_per_node:
            raise ImpossibleError(
                f"gpus_per_node={config.gpus_per_node} is more than a node of cluster={self.profile.name} has: "
                f"choose at most {self.profile.gpus_per_node}."
            )
        shape = compute_job_shape(config)
        if shape not in self._refusal_by_shape:
            self._refusal_by_shape[shape] = self._find_refusal(*shape) if self.unchecked_reason is None else None
        if self._refusal_by_shape[shape] is not None:
            raise ImpossibleError(
                f"cluster={self.profile.name} refuses {shape[0]} node(s) with {shape[1]} task(s) each: "
                f"{self._refusal_by_shape[shape]}. Choose other fields of cluster, or fewer gpus."
            )

    @staticmethod
    def check_store(store: Path) -> None:
        """Raise `UsageError` for a path that SLURM reads its own way: it expands % in the folder a job runs in."""
        path = str(store.resolve())
        if set(path) & set("%\\"):
            raise UsageError(f"store={store} is not valid on a cluster: choose a path without % and backslashes.")

    def _find_refusal(self, nodes: int, tasks_per_node: int, gpus_per_task: int) -> str | None:
        """What sbatch says against jobs of a shape, without submitting one; None if it takes them."""
        parameters = self.profile.build_sbatch_parameters(
            job_name="bench-test",
            nodes=nodes,
            tasks_per_node=tasks_per_node,
            time_limit_min=self.profile.time_limit_min or 1,
            gpus_per_task=gpus_per_task,
        )
        script_text = build_sbatch_script(parameters, Path("/tmp"), num_elements=1, command="true")
        try:
            queue.check_script(script_text)
        except queue.SlurmError as error:
            is_unavailable = "node configuration is not available" in str(error)
            if is_unavailable and self.profile.gpu_request != "none" and not queue.has_gpus():
                return f"{str(error).rstrip('.')}; SLURM knows of no GPU on any node: choose cluster.gpu_request=none"
            return str(error).rstrip(".")
        return None

    def plan_arrays(self, tasks: Sequence[LaunchTask], store: Path, submission_name: str) -> list[PlannedArray]:
        """Group tasks into arrays: one per resource shape, small ones first, cut where the cluster cuts arrays.

        Parameters
        ----------
        submission_name: str
            Of the submission.
        """
        tasks_by_shape: dict[JobShape, list[LaunchTask]] = {}
        for task in tasks:
            tasks_by_shape.setdefault(compute_job_shape(task.config), []).append(task)
        max_size = self._max_array_size
        planned_arrays: list[PlannedArray] = []
        for shape in sorted(tasks_by_shape):
            shape_tasks = tasks_by_shape[shape]
            for start in range(0, len(shape_tasks), max_size):
                planned_arrays.append(
                    self._plan_array(
                        shape_tasks[start : start + max_size], shape, store, submission_name, len(planned_arrays)
                    )
                )
        return planned_arrays

    def _plan_array(
        self, tasks: list[LaunchTask], shape: JobShape, store: Path, submission_name: str, array_number: int
    ) -> PlannedArray:
        expected_times_s = [predict_duration_s(task.config, search=task.search) for task in tasks]
        submitted_runs = [
            SubmittedRun(
                task.config.run_id,
                task.config.label,
                task.search,
                records.find_next_attempt(store, task.config.run_id),
                None if task.search else build_configured_columns(task.config),
            )
            for task in tasks
        ]
        array = JobArray(
            name=f"{array_number}-{shape[0]}x{shape[1]}",
            job_name=f"{JOB_NAME_PREFIX}-{submission_name}-{array_number}",
            nodes=shape[0],
            tasks_per_node=shape[1],
            time_limit_min=self.profile.time_limit_min or compute_time_limit_min(max(expected_times_s)),
            expected_s=sum(expected_times_s),
            longest_s=max(expected_times_s),
            entries=submitted_runs,
            gpus_per_task=shape[2],
        )
        return PlannedArray(array, tasks)

    def build_script(self, array: JobArray, store: Path, submission_name: str) -> str:
        """The sbatch script of an array, as it would be submitted now."""
        return build_array_script(self.profile, array, store, submission_name)

    def refuse_rejected_arrays(self, arrays: Sequence[JobArray], store: Path, submission_name: str) -> None:
        """Raise `UsageError` if the cluster would refuse an array as it is, with its time limit; submits nothing."""
        for array in arrays if self.unchecked_reason is None else ():
            try:
                queue.check_script(self.build_script(array, store, submission_name))
            except queue.SlurmError as error:
                raise UsageError(
                    f"cluster={self.profile.name} refuses array {array.name}, of {array.time_limit_min} min a run: "
                    f"{str(error).rstrip('.')}. Nothing was submitted: choose cluster.time_limit_min, another "
                    "partition, or other runs."
                ) from None

    def submit(
        self,
        planned_arrays: Sequence[PlannedArray],
        store: Path,
        sweep: str,
        submission_name: str,
        tracker: Tracker = NO_TRACKER,
    ) -> Submission:
        """Submit arrays, one after the other, each to start when the one before it is over.

        Whatever stops it, a signal included, nothing of the submission is left in the queue.

        Raises
        ------
        UsageError
            If the cluster refuses one, none of its jobs could ever start, or the store cannot be written.
        """
        with _raise_interrupt_on(signal.SIGTERM, signal.SIGHUP):
            return self._submit_arrays(planned_arrays, store, sweep, submission_name, tracker)

    def _submit_arrays(
        self, planned_arrays: Sequence[PlannedArray], store: Path, sweep: str, submission_name: str, tracker: Tracker
    ) -> Submission:
        store = store.resolve()
        arrays = [planned_array.array for planned_array in planned_arrays]
        try:
            code_folder = code_snapshot.take_snapshot(
                store, [task.config for planned_array in planned_arrays for task in planned_array.tasks]
            )
            submission = submissions.write_submission(
                store, sweep, vars(self.profile), code_folder.name, arrays, submission_name, vars(tracker)
            )
        except OSError as error:
            reason = f"{error.strerror or error}: nothing was submitted"
            raise invalid_value_error("store", store, f"a folder that can be written to ({reason})") from None
        previous_job_id: str | None = None
        try:
            for planned_array in planned_arrays:
                self._write_array_files(planned_array, submission, store, previous_job_id, tracker)
                previous_job_id = queue.submit_script(
                    submission.folder / planned_array.array.name / SCRIPT_FILE_NAME,
                    code_folder,
                    planned_array.array.job_name,
                )
                submission.write_job_id(planned_array.array, previous_job_id)
            _refuse_never_starting_jobs(submission)
        except BaseException as error:
            leftover_text = _cancel_submission(submission)
            if not isinstance(error, queue.SlurmError | OSError):
                print(leftover_text, file=sys.stderr)
                raise
            message = " ".join(str(error).split()).rstrip(".")
            raise UsageError(
                f"cluster={self.profile.name} does not take these jobs: {message}. {leftover_text}"
            ) from None
        return submission

    def _write_array_files(
        self,
        planned_array: PlannedArray,
        submission: Submission,
        store: Path,
        previous_job_id: str | None,
        tracker: Tracker,
    ) -> None:
        """Write all that an array's jobs need: once sbatch has accepted the script, nothing is left to do."""
        folder = submission.folder / planned_array.array.name
        for index, (task, submitted_run) in enumerate(
            zip(planned_array.tasks, planned_array.array.entries, strict=True)
        ):
            job = SlurmJob(
                task=task,
                attempts_before=submitted_run.attempts_before,
                store=store,
                job_folder=folder,
                sweep=submission.sweep,
                time_limit_s=60.0 * planned_array.array.time_limit_min,
                start_timeout_s=float(self.profile.start_timeout_s),
                requeue=self.profile.requeue,
                submission_info={
                    "cluster": self.profile.name,
                    "submission": submission.name,
                    "exclusive": self.profile.exclusive,
                    "parallelism": self.profile.parallelism,
                },
                check_nodes=self.profile.check == "quick",
                tracker=tracker,
            )
            delayed_submission = DelayedSubmission(job)
            delayed_submission.set_timeout(planned_array.array.time_limit_min, 0)
            delayed_submission.dump(folder / f"{index}.pkl")
        script_text = build_array_script(self.profile, planned_array.array, store, submission.name, previous_job_id)
        (folder / SCRIPT_FILE_NAME).write_text(script_text)


def compute_job_shape(config: RunConfig) -> JobShape:
    """Nodes, tasks on each and GPUs of each task that a run asks for."""
    return config.active_nodes, config.active_processes // config.active_nodes, config.devices_per_process


@contextlib.contextmanager
def _raise_interrupt_on(*signals: signal.Signals) -> Iterator[None]:
    """Have some signals raise KeyboardInterrupt as SIGINT does, but for those that are ignored (nohup)."""
    previous_handlers = {signal_number: signal.getsignal(signal_number) for signal_number in signals}
    try:
        for signal_number, handler in previous_handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signal_number, signal.default_int_handler)
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


def _cancel_submission(submission: Submission) -> str:
    """Cancel what was submitted, wait until none of it is in the queue, and say what is left."""
    with StopSignal(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second one must not leave the rest behind
        try:
            # By name too: sbatch may have failed after SLURM had taken the array.
            job_id_by_name = queue.find_job_ids_by_name([array.job_name for array in submission.arrays])
            job_ids = sorted(
                {*job_id_by_name.values(), *filter(None, map(submission.read_job_id, submission.arrays))}, key=int
            )
            queue.cancel_jobs(job_ids)
            deadline = time.monotonic() + CANCEL_TIMEOUT_S
            while set(job_ids) & set(queue.list_array_ids(queue.list_live_jobs())) and time.monotonic() < deadline:
                time.sleep(0.5)
        except (queue.SlurmError, OSError) as error:
            return f"What was submitted before that could not be cancelled ({error}): bench.jobs cancel does it later."
        store = submission.folder.parents[1]
        held_claims = filter(None, (claims.find_claim(store, run_id) for run_id in claims.list_claimed_runs(store)))
        if not any(str(claim.owner.get("job")).partition("_")[0] in job_ids for claim in held_claims):
            submission.close()  # otherwise `collect` writes down what was killed before it could write its row
    return "Nothing of it is left in the queue."


def _refuse_never_starting_jobs(submission: Submission) -> None:
    """Raise `SlurmError` if SLURM soon says that jobs wait for what never comes."""
    job_ids = [submission.read_job_id(array) for array in submission.arrays]
    deadline = time.monotonic() + PENDING_REASON_TIMEOUT_S
    while True:
        waiting_jobs = [
            state
            for state in queue.list_live_jobs().values()
            if state.job_id.partition("_")[0] in job_ids and state.state == "PENDING"
        ]
        has_undecided_job = any(state.reason in queue.UNDECIDED_PENDING_REASONS for state in waiting_jobs)
        for state in waiting_jobs:
            if state.reason in queue.PERMANENT_PENDING_REASONS:
                raise queue.SlurmError(f"job {state.job_id} would wait for ever, says SLURM: {state.reason}")
        if not has_undecided_job or time.monotonic() > deadline:
            return
        time.sleep(PENDING_REASON_TIMEOUT_S / 10)


# --- Nodes that a cluster's health checks found wanting: what runs that are submitted again leave out.


def find_bad_nodes(attempt_rows: Iterable[Record]) -> list[str]:
    """Hosts whose last health check failed: a node that was repaired passes the next one that it gets.

    Parameters
    ----------
    attempt_rows: iterable of dict
        Every attempt of every run of a store.
    """
    is_bad_by_host: dict[str, bool] = {}
    for row in sorted(attempt_rows, key=lambda row: str(row.get("finished_at") or "")):
        failed_hosts = set(str(row.get("failed_nodes") or "").split(",")) - {""}
        checked_hosts = {
            str(rank_row["health"]["node"]) for rank_row in row.get("ranks") or [] if rank_row.get("health")
        }
        is_bad_by_host |= {host: host in failed_hosts for host in checked_hosts | failed_hosts}
    return sorted(host for host, is_bad in is_bad_by_host.items() if is_bad)


def format_exclude_list(exclude: str | None, nodes: Iterable[str]) -> str | None:
    """SLURM's list of nodes to leave out, with some more."""
    return ",".join([*([exclude] if exclude else []), *nodes]) or None
