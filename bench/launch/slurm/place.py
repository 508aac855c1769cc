"""Where a process stands in its SLURM job, and what SLURM's signals mean to it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from signal import SIGINT, SIGTERM, SIGUSR2
from types import FrameType
from typing import Any

import submitit

from bench.launch.owners import this_user
from bench.launch.slurm import endings
from bench.launch.stop import StopSignal
from bench.rank import RankPlace


@dataclass(frozen=True)
class JobPlace:
    """Where this process stands in its job, from the variables SLURM sets."""

    job_id: str
    restart: int
    """How often SLURM started the job before."""
    rank: RankPlace
    node: int
    nodes: list[str]
    tasks_per_node: int

    @classmethod
    def from_environment(cls) -> JobPlace:
        """Read the environment of a task that srun started.

        Raises
        ------
        RuntimeError
            If ranks are not numbered node by node, as process groups inside nodes need them to be.
        """
        environment = submitit.JobEnvironment()
        rank, local_rank, world_size = environment.global_rank, environment.local_rank, environment.num_tasks
        tasks_per_node = world_size // environment.num_nodes
        if (rank // tasks_per_node, rank % tasks_per_node) != (environment.node, local_rank):
            raise RuntimeError(f"rank {rank} is task {local_rank} of node {environment.node}: not numbered by node")
        place = RankPlace(rank, local_rank, world_size)
        restart = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        hosts = list(environment.hostnames)
        return cls(environment.job_id, restart, place, environment.node, hosts, tasks_per_node)

    @property
    def owner(self) -> dict[str, Any]:
        """The job as the owner of a claim."""
        return {"job": self.job_id, "restart": self.restart, "user": this_user()}


class JobSignal(StopSignal):
    """A signal of SLURM's that means the run must end.

    SIGUSR2 comes at preemption, but also as a warning up to minutes before the time limit, by which the job will have
    ended by itself: SLURM is asked which it is, and a warning is forgotten. Where it cannot be asked, in a container
    without its commands, a signal that comes too early to be a warning is none.

    Parameters
    ----------
    ends_at: float
        When the job comes to its time limit, on `time.monotonic`.
    """

    def __init__(self, place: JobPlace, ends_at: float) -> None:
        super().__init__(SIGINT, SIGTERM, SIGUSR2)
        self._place = place
        self._ends_at = ends_at
        self._warned = False

    @property
    def received(self) -> str | None:
        """Name of the signal, if one came and means the end."""
        if self._warned and self._received is None:
            self._warned = False
            cause, early = self.cause()[0], time.monotonic() < self._ends_at - endings.STOPPED_BY_LIMIT_S
            if early if cause == "unknown" else cause not in ("time limit", "none"):
                self._received = SIGUSR2.name
        return self._received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == SIGUSR2:
            self._warned = True
        else:
            super()._receive(number, frame)

    def cause(self) -> tuple[str, str]:
        """Why the signal came, as `endings.why_stopped` says it."""
        return endings.why_stopped(self._place.job_id, self._place.restart, self._place.nodes)
