"""Launch on a SLURM cluster: group runs into job arrays and submit them; following them is for later."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedSubmissionError

from bench import records
from bench.config import RunConfig
from bench.errors import ImpossibleError, UsageError
from bench.hardware import refuse_unsupported
from bench.hardware.detect import Device
from bench.launch.slurm import ledger, queue, snapshot
from bench.launch.slurm.job import SlurmJob
from bench.launch.slurm.ledger import Array, Entry, Submission
from bench.launch.slurm.profile import SlurmProfile
from bench.launch.task import Task
from bench.planning.estimate import expected_s, time_limit_min
from bench.tracking import NO_TRACKER, Tracker
from bench.typed import typed

JOB_NAME = "bench"

FIRST_LOOK_S = 3.0
"""How long SLURM may take to say why a job waits."""

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
        parameters = self._parameters(
            "bench-test", nodes, tasks_per_node, self.profile.time_limit_min or 1, gpus_per_task
        )
        text = script(parameters, Path("/tmp"), count=1, command="true")
        try:
            queue.test(text)
        except queue.SlurmError as error:
            return str(error).rstrip(".")
        return None

    def _parameters(
        self, job_name: str, nodes: int, tasks_per_node: int, minutes: int, gpus_per_task: int
    ) -> dict[str, Any]:
        return self.profile.sbatch_parameters(
            job_name=job_name, nodes=nodes, tasks_per_node=tasks_per_node, minutes=minutes, gpus_per_task=gpus_per_task
        )

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
            entries=entries,
            gpus_per_task=shape[2],
        )
        return Batch(array, tasks)

    def script(self, array: Array, store: Path, name: str) -> str:
        """The sbatch script of an array, as it would be submitted now."""
        folder = store.resolve() / ledger.FOLDER / name / array.name
        return script(
            self._array_parameters(array, name), folder, count=len(array.entries), python=self.profile.command
        )

    def _array_parameters(self, array: Array, name: str) -> dict[str, Any]:
        parameters = self._parameters(
            array.job_name, array.nodes, array.tasks_per_node, array.time_limit_min, array.gpus_per_task
        )
        # Relative to the snapshot, in which jobs run: sbatch would read % and quotes in a store's path its own way.
        job = "%A_%a" if len(array.entries) > 1 else "%j"
        log = f"../../{ledger.FOLDER}/{name}/{array.name}/{job}"
        parameters["additional_parameters"] |= {"output": f"{log}_0_log.out"}
        parameters["srun_args"] = ["--output", f"{log}_%t_log.out", "--open-mode=append", *parameters["srun_args"]]
        return parameters

    def submit(
        self, batches: Sequence[Batch], store: Path, sweep: str, name: str, tracker: Tracker = NO_TRACKER
    ) -> Submission:
        """Submit arrays, one after the other, each to start when the one before it is over.

        Raises
        ------
        UsageError
            If the cluster refuses one, or none of its jobs could ever start; what was submitted is cancelled.
        """
        store = store.resolve()
        code = snapshot.take(store, [task.config for batch in batches for task in batch.tasks])
        arrays = [batch.array for batch in batches]
        submission = ledger.enter(store, sweep, vars(self.profile), code.name, arrays, name, vars(tracker))
        before: str | None = None
        submitted = []
        try:
            for batch in batches:
                before = self._submit_array(batch, submission, store, code, before, tracker)
                submitted.append(before)
            _refuse_never_starting(submitted)
        except (FailedSubmissionError, queue.SlurmError) as error:
            with contextlib.suppress(queue.SlurmError):
                queue.cancel(submitted)
            submission.close()
            words = " ".join(str(error).split())
            raise UsageError(
                f"cluster={self.profile.name} takes no such jobs, and none is left of them: {words}"
            ) from None
        return submission

    def _submit_array(
        self, batch: Batch, submission: Submission, store: Path, code: Path, before: str | None, tracker: Tracker
    ) -> str:
        folder = submission.folder / batch.array.name
        executor = submitit.SlurmExecutor(folder, python=self.profile.command)
        parameters = self._array_parameters(batch.array, submission.name)
        executor.update_parameters(**parameters, dependency=before and f"afterany:{before}")
        jobs = [
            SlurmJob(
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
                tracker=tracker,
            )
            for task, entry in zip(batch.tasks, batch.array.entries, strict=True)
        ]
        with contextlib.chdir(code), executor.batch():  # sbatch has jobs run where it is called
            submitted = [executor.submit(job) for job in jobs]
        job_id = str(submitted[0].job_id).partition("_")[0]
        submission.note_job_id(batch.array, job_id)
        return job_id


def shape_of(config: RunConfig) -> Shape:
    """Nodes, tasks on each and GPUs of each task that a run asks for."""
    return config.machines, config.processes // config.machines, config.devices_per_process


def script(
    parameters: dict[str, Any], folder: Path, *, count: int, python: str | None = None, command: str = ""
) -> str:
    """The text submitit gives sbatch for an array of `count` elements."""
    from submitit.slurm.slurm import _make_sbatch_string

    executor = submitit.SlurmExecutor(folder, python=python) if not command else None
    return str(
        _make_sbatch_string(
            command=command or executor._submitit_command_str,  # type: ignore[union-attr]
            folder=folder,
            map_count=count if count > 1 else None,
            **parameters,
        )
    )


def _refuse_never_starting(jobs: Sequence[str]) -> None:
    """Raise `SlurmError` if SLURM soon says that jobs wait for what never comes."""
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
