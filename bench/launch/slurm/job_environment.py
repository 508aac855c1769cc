"""Where a process stands in its SLURM job, and what SLURM's signals mean to it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from signal import SIGINT, SIGTERM, SIGUSR2
from types import FrameType
from typing import Any

import submitit

from bench.launch.attempt import get_user_name
from bench.launch.ranks import StopSignal
from bench.launch.slurm import job_end
from bench.rank.coordinates import RankCoordinates


@dataclass(frozen=True)
class SlurmJobEnvironment:
    """Where this process stands in its job, from the variables SLURM sets."""

    job_id: str
    restart_count: int
    """How often SLURM started the job before."""
    coordinates: RankCoordinates
    node_index: int
    nodes: list[str]
    tasks_per_node: int

    @classmethod
    def from_environment(cls) -> SlurmJobEnvironment:
        """Read the environment of a task that srun started.

        Raises
        ------
        RuntimeError
            If ranks are not numbered node by node, as process groups inside nodes need them to be.
        """
        submitit_environment = submitit.JobEnvironment()
        rank, local_rank, world_size = (
            submitit_environment.global_rank,
            submitit_environment.local_rank,
            submitit_environment.num_tasks,
        )
        tasks_per_node = world_size // submitit_environment.num_nodes
        if (rank // tasks_per_node, rank % tasks_per_node) != (submitit_environment.node, local_rank):
            raise RuntimeError(
                f"rank {rank} is task {local_rank} of node {submitit_environment.node}: not numbered by node"
            )
        coordinates = RankCoordinates(rank, local_rank, world_size)
        restart_count = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        hosts = list(submitit_environment.hostnames)
        return cls(
            submitit_environment.job_id, restart_count, coordinates, submitit_environment.node, hosts, tasks_per_node
        )

    @property
    def claim_owner(self) -> dict[str, Any]:
        """The job as the owner of a claim."""
        return {"job": self.job_id, "restart": self.restart_count, "user": get_user_name()}


class SlurmStopSignal(StopSignal):
    """A signal of SLURM's that means the run must end.

    SIGUSR2 comes at preemption, but also as a warning up to minutes before the time limit, by which the job will have
    ended by itself: SLURM is asked which it is, and a warning is forgotten. Where it cannot be asked, in a container
    without its commands, a signal that comes too early to be a warning is none.

    Parameters
    ----------
    ends_at: float
        When the job comes to its time limit, on `time.monotonic`.
    """

    def __init__(self, job_environment: SlurmJobEnvironment, ends_at: float) -> None:
        super().__init__(SIGINT, SIGTERM, SIGUSR2)
        self._job_environment = job_environment
        self._ends_at = ends_at
        self._has_warning = False

    @property
    def received(self) -> str | None:
        """Name of the signal, if one came and means the end."""
        if self._has_warning and self._received is None:
            self._has_warning = False
            reason, is_early = (
                self.find_stop_reason()[0],
                time.monotonic() < self._ends_at - job_end.TIME_LIMIT_MARGIN_S,
            )
            if is_early if reason == "unknown" else reason not in ("time limit", "none"):
                self._received = SIGUSR2.name
        return self._received

    def _receive(self, signal_number: int, frame: FrameType | None) -> None:
        if signal_number == SIGUSR2:
            self._has_warning = True
        else:
            super()._receive(signal_number, frame)

    def find_stop_reason(self) -> tuple[str, str]:
        """Why the signal came, as `find_stop_reason` says it."""
        return job_end.find_stop_reason(
            self._job_environment.job_id, self._job_environment.restart_count, self._job_environment.nodes
        )
