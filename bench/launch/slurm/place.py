"""Where a process stands in its SLURM job, and what SLURM's signals mean to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from signal import SIGINT, SIGTERM, SIGUSR2
from types import FrameType
from typing import Any

import submitit

from bench.launch.slurm import queue
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
        return {"job": self.job_id, "restart": self.restart}


class JobSignal(StopSignal):
    """A signal of SLURM's that means the run must end.

    SIGUSR2 comes at preemption, but also as a warning up to minutes before the time limit, by which the job will have
    ended by itself: SLURM is asked which it is, and a warning is forgotten.
    """

    def __init__(self, place: JobPlace) -> None:
        super().__init__(SIGINT, SIGTERM, SIGUSR2)
        self._place = place
        self._warned = False

    @property
    def received(self) -> str | None:
        """Name of the signal, if one came and means the end."""
        if self._warned and self._received is None:
            self._warned = False
            if self.cause()[0] not in ("time limit", "unknown"):
                self._received = SIGUSR2.name
        return self._received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == SIGUSR2:
            self._warned = True
        else:
            super()._receive(number, frame)

    def cause(self) -> tuple[str, str]:
        """Why the signal came, as `queue.why_stopped` says it."""
        return queue.why_stopped(self._place.job_id, self._place.restart, self._place.nodes)
