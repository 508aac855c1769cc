"""Launch on a SLURM cluster: group runs into job arrays and submit them; following them is for later."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission

from bench import records
from bench.config import RunConfig
from bench.errors import ImpossibleError, UsageError, bad_value
from bench.hardware import refuse_unsupported
from bench.hardware.detect import Device
from bench.launch.slurm import ledger, queue, snapshot
from bench.launch.slurm.bad_nodes import bad_nodes, excluding
from bench.launch.slurm.job import SlurmJob
from bench.launch.slurm.ledger import Array, Entry, Submission
from bench.launch.slurm.profile import SlurmProfile
from bench.launch.slurm.script import array_script, script
from bench.launch.stop import StopSignal
from bench.launch.task import Task
from bench.planning.estimate import expected_s, time_limit_min
from bench.records import claims
from bench.row import configured_row
from bench.tracking import NO_TRACKER, Tracker
from bench.typed import typed

JOB_NAME = "bench"

SCRIPT = "submission.sh"

FIRST_LOOK_S = 3.0
"""How long SLURM may take to say why a job waits."""

GONE_S = 60.0
"""How long a cancelled job may take to be gone."""

ARRAY_SIZE_WITHOUT_SLURM = 1001
"""SLURM's default, where there is no cluster to ask."""


Shape = tuple[int, int, int]
"""Nodes, tasks on each, GPUs of each task."""


@dataclass(frozen=True)
class Batch:
    """An array and its tasks, in the same order."""

    array: Array
    tasks: list[Task]


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

    unasked: str | None = None
    """Why nothing was checked with SLURM, if nothing was."""

    def __init__(self, cluster: dict[str, Any], *, dry_run: bool) -> None:
        self.profile: SlurmProfile = typed("cluster", SlurmProfile, cluster)
        try:
            self._largest_array = queue.max_array_size()
        except queue.SlurmError as error:
            if not dry_run:
                raise UsageError(f"cluster={self.profile.name} cannot be asked: {error}.") from None
            self._largest_array, self.unasked = ARRAY_SIZE_WITHOUT_SLURM, str(error)
        self._refusals: dict[Shape, str | None] = {}

    def leave_out_bad_nodes(self, store: Path) -> list[str]:
        """Exclude the nodes whose last health check failed, if the cluster's file asks for that; returns them."""
        if not self.profile.exclude_bad or not store.is_dir():
            return []
        nodes = bad_nodes(records.read_attempts(store).records)
        self.profile = dataclasses.replace(self.profile, exclude=excluding(self.profile.exclude, nodes))
        return nodes

    def check(self, config: RunConfig) -> None:
        """Raise `ImpossibleError` where this cluster cannot execute a run."""
        config.strategy.check_installed()
        if config.hardware.device == "cpu":
            nodes_processor = Device("cpu", "the nodes' processors", 0)
            refuse_unsupported(config.hardware, nodes_processor, config.precision, compile_blocks=False)
        if not config.rehearsed and config.gpus_per_node > self.profile.gpus_per_node:
            raise ImpossibleError(
                f"gpus_per_node={config.gpus_per_node} is more than a node of cluster={self.profile.name} has: "
                f"choose at most {self.profile.gpus_per_node}."
            )
        shape = shape_of(config)
        if shape not in self._refusals:
            self._refusals[shape] = self._refusal(*shape) if self.unasked is None else None
        if self._refusals[shape] is not None:
            raise ImpossibleError(
                f"cluster={self.profile.name} refuses {shape[0]} node(s) with {shape[1]} task(s) each: "
                f"{self._refusals[shape]}. Choose other fields of cluster, or fewer gpus."
            )

    @staticmethod
    def check_store(store: Path) -> None:
        """Raise `UsageError` for a path that SLURM reads its own way: it expands % in the folder a job runs in."""
        path = str(store.resolve())
        if set(path) & set("%\\"):
            raise UsageError(f"store={store} is not valid on a cluster: choose a path without % and backslashes.")

    def _refusal(self, nodes: int, tasks_per_node: int, gpus_per_task: int) -> str | None:
        """What sbatch says against jobs of a shape, without submitting one; None if it takes them."""
        parameters = self.profile.sbatch_parameters(
            job_name="bench-test",
            nodes=nodes,
            tasks_per_node=tasks_per_node,
            minutes=self.profile.time_limit_min or 1,
            gpus_per_task=gpus_per_task,
        )
        text = script(parameters, Path("/tmp"), count=1, command="true")
        try:
            queue.test(text)
        except queue.SlurmError as error:
            unavailable = "node configuration is not available" in str(error)
            if unavailable and self.profile.gpu_request != "none" and not queue.has_gpus():
                return f"{str(error).rstrip('.')}; SLURM knows of no GPU on any node: choose cluster.gpu_request=none"
            return str(error).rstrip(".")
        return None

    def batches(self, tasks: Sequence[Task], store: Path, name: str) -> list[Batch]:
        """Group tasks into arrays: one per resource shape, small ones first, cut where the cluster cuts arrays.

        Parameters
        ----------
        name: str
            Of the submission.
        """
        by_shape: dict[Shape, list[Task]] = {}
        for task in tasks:
            by_shape.setdefault(shape_of(task.config), []).append(task)
        size = self._largest_array
        batches: list[Batch] = []
        for shape in sorted(by_shape):
            whole = by_shape[shape]
            for start in range(0, len(whole), size):
                batches.append(self._batch(whole[start : start + size], shape, store, name, len(batches)))
        return batches

    def _batch(self, tasks: list[Task], shape: Shape, store: Path, name: str, number: int) -> Batch:
        expected = [expected_s(task.config, search=task.search) for task in tasks]
        entries = [
            Entry(
                task.config.run_id,
                task.config.label,
                task.search,
                records.next_attempt(store, task.config.run_id),
                None if task.search else configured_row(task.config),
            )
            for task in tasks
        ]
        array = Array(
            name=f"{number}-{shape[0]}x{shape[1]}",
            job_name=f"{JOB_NAME}-{name}-{number}",
            nodes=shape[0],
            tasks_per_node=shape[1],
            time_limit_min=self.profile.time_limit_min or time_limit_min(max(expected)),
            expected_s=sum(expected),
            longest_s=max(expected),
            entries=entries,
            gpus_per_task=shape[2],
        )
        return Batch(array, tasks)

    def script(self, array: Array, store: Path, name: str) -> str:
        """The sbatch script of an array, as it would be submitted now."""
        return array_script(self.profile, array, store, name)

    def refuse_arrays(self, arrays: Sequence[Array], store: Path, name: str) -> None:
        """Raise `UsageError` if the cluster would refuse an array as it is, with its time limit; submits nothing."""
        for array in arrays if self.unasked is None else ():
            try:
                queue.test(self.script(array, store, name))
            except queue.SlurmError as error:
                raise UsageError(
                    f"cluster={self.profile.name} refuses array {array.name}, of {array.time_limit_min} min a run: "
                    f"{str(error).rstrip('.')}. Nothing was submitted: choose cluster.time_limit_min, another "
                    "partition, or other runs."
                ) from None

    def submit(
        self, batches: Sequence[Batch], store: Path, sweep: str, name: str, tracker: Tracker = NO_TRACKER
    ) -> Submission:
        """Submit arrays, one after the other, each to start when the one before it is over.

        Whatever stops it, a signal included, nothing of the submission is left in the queue.

        Raises
        ------
        UsageError
            If the cluster refuses one, none of its jobs could ever start, or the store cannot be written.
        """
        with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
            return self._submit(batches, store, sweep, name, tracker)

    def _submit(self, batches: Sequence[Batch], store: Path, sweep: str, name: str, tracker: Tracker) -> Submission:
        store = store.resolve()
        arrays = [batch.array for batch in batches]
        try:
            code = snapshot.take(store, [task.config for batch in batches for task in batch.tasks])
            submission = ledger.enter(store, sweep, vars(self.profile), code.name, arrays, name, vars(tracker))
        except OSError as error:
            reason = f"{error.strerror or error}: nothing was submitted"
            raise bad_value("store", store, f"a folder that can be written to ({reason})") from None
        before: str | None = None
        try:
            for batch in batches:
                self._write_array(batch, submission, store, before, tracker)
                before = queue.submit(submission.folder / batch.array.name / SCRIPT, code, batch.array.job_name)
                submission.note_job_id(batch.array, before)
            _refuse_never_starting(submission)
        except BaseException as error:
            left = _take_back(submission)
            if not isinstance(error, queue.SlurmError | OSError):
                print(left, file=sys.stderr)
                raise
            words = " ".join(str(error).split()).rstrip(".")
            raise UsageError(f"cluster={self.profile.name} does not take these jobs: {words}. {left}") from None
        return submission

    def _write_array(
        self, batch: Batch, submission: Submission, store: Path, before: str | None, tracker: Tracker
    ) -> None:
        """Write all that an array's jobs need: once sbatch has accepted the script, nothing is left to do."""
        folder = submission.folder / batch.array.name
        for index, (task, entry) in enumerate(zip(batch.tasks, batch.array.entries, strict=True)):
            job = SlurmJob(
                task=task,
                attempts_before=entry.attempts_before,
                store=store,
                folder=folder,
                sweep=submission.sweep,
                time_limit_s=60.0 * batch.array.time_limit_min,
                start_timeout_s=float(self.profile.start_timeout_s),
                requeue=self.profile.requeue,
                facts={
                    "cluster": self.profile.name,
                    "submission": submission.name,
                    "exclusive": self.profile.exclusive,
                    "parallelism": self.profile.parallelism,
                },
                check_nodes=self.profile.check == "quick",
                tracker=tracker,
            )
            delayed = DelayedSubmission(job)
            delayed.set_timeout(batch.array.time_limit_min, 0)
            delayed.dump(folder / f"{index}.pkl")
        text = array_script(self.profile, batch.array, store, submission.name, before)
        (folder / SCRIPT).write_text(text)


def shape_of(config: RunConfig) -> Shape:
    """Nodes, tasks on each and GPUs of each task that a run asks for."""
    return config.machines, config.processes // config.machines, config.devices_per_process


@contextlib.contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Have some signals raise KeyboardInterrupt as SIGINT does, but for those that are ignored (nohup)."""
    before = {number: signal.getsignal(number) for number in signals}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_back(submission: Submission) -> str:
    """Cancel what was submitted, wait until none of it is in the queue, and say what is left."""
    with StopSignal(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second one must not leave the rest behind
        try:
            # By name too: sbatch may have failed after SLURM had taken the array.
            names = queue.by_name([array.job_name for array in submission.arrays])
            jobs = sorted({*names.values(), *filter(None, map(submission.job_id, submission.arrays))}, key=int)
            queue.cancel(jobs)
            deadline = time.monotonic() + GONE_S
            while set(jobs) & set(queue.arrays_of(queue.alive())) and time.monotonic() < deadline:
                time.sleep(0.5)
        except (queue.SlurmError, OSError) as error:
            return f"What was submitted before that could not be cancelled ({error}): bench.jobs cancel does it later."
        store = submission.folder.parents[1]
        held = filter(None, (claims.held(store, run_id) for run_id in claims.running(store)))
        if not any(str(claim.owner.get("job")).partition("_")[0] in jobs for claim in held):
            submission.close()  # otherwise `collect` writes down what was killed before it could write its row
    return "Nothing of it is left in the queue."


def _refuse_never_starting(submission: Submission) -> None:
    """Raise `SlurmError` if SLURM soon says that jobs wait for what never comes."""
    jobs = [submission.job_id(array) for array in submission.arrays]
    deadline = time.monotonic() + FIRST_LOOK_S
    while True:
        waiting = [s for s in queue.alive().values() if s.job_id.partition("_")[0] in jobs and s.state == "PENDING"]
        undecided = any(state.reason in queue.UNDECIDED for state in waiting)
        for state in waiting:
            if state.reason in queue.NEVER_STARTS:
                raise queue.SlurmError(f"job {state.job_id} would wait for ever, says SLURM: {state.reason}")
        if not undecided or time.monotonic() > deadline:
            return
        time.sleep(FIRST_LOOK_S / 10)
