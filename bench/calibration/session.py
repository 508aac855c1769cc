"""One calibration from beginning to end: everything that is timed, and whether others disturbed it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from bench.calibration.collectives import measure_collectives
from bench.calibration.compute import measure_compute
from bench.calibration.noise import Waiting, disturbances, reference
from bench.calibration.sample import Sample
from bench.calibration.world import Process, on_this_machine
from bench.measure import environment


@dataclass(frozen=True)
class Extent:
    """What is to be timed."""

    device: str
    """cpu or cuda."""
    threads: int
    """That a process computes with on a CPU."""
    compute: bool
    collectives: bool
    ranks: int
    """Processes to start for collectives, where nobody has started them; fewer than 2 time none."""
    quick: bool


@dataclass
class Measured:
    """What was timed."""

    device: torch.device
    processes: str = "1 process"
    """Who communicated, in words."""
    references: list[Sample] = field(default_factory=list)
    """The same measurement, again and again."""
    compute: list[Sample] = field(default_factory=list)
    collectives: list[Sample] = field(default_factory=list)
    waiting: float = 0.0
    """Share of the time in which other processes had this one's processor."""

    @property
    def samples(self) -> list[Sample]:
        """All of it."""
        return [*self.references, *self.compute, *self.collectives]


def measured(extent: Extent, process: Process | None) -> Measured | None:
    """Time everything; None on a process that only communicates with the one that leads.

    On a machine that is busy from the beginning that is all that is found: the rest would take minutes for nothing.

    Parameters
    ----------
    process: Process or None
        This one among those that torchrun or srun started; None to start others where they are needed.
    """
    if process is not None and process.rank > 0:
        communicate(process, extent)
        return None
    torch.set_num_threads(extent.threads)
    on_gpu = extent.device == "cuda"
    device = process.device(extent.device) if process else torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    found, waiting = Measured(device), Waiting()
    with waiting.watched():
        found.references.append(reference(device))
    if process is None and disturbances(found.references, waiting.share):
        found.waiting = waiting.share
        return found
    if extent.collectives and (process is not None or extent.ranks > 1):
        found.collectives = (
            communicate(process, extent) if process else on_this_machine(extent.ranks, communicate, extent)
        )
        found.processes = _processes(process.size if process else extent.ranks, found.collectives)
        with waiting.watched():
            found.references.append(reference(device))
    if extent.compute:
        with waiting.watched():
            found.compute = measure_compute(device, extent.threads, quick=extent.quick, progress=say)
            found.references.append(reference(device))
    found.waiting = waiting.share
    return found


def communicate(process: Process, extent: Extent) -> list[Sample]:
    """One process's part in the timing of collectives; all get the samples."""
    torch.set_num_threads(extent.threads)
    device = process.device(extent.device)
    with process.communicating(device):
        host, leads = environment.host(), process.rank == 0
        return measure_collectives(device, host, quick=extent.quick, progress=say if leads else _say_nothing)


def say(text: str) -> None:
    """Tell whoever waits what is being timed."""
    print(text, file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass


def _processes(number: int, timed: list[Sample]) -> str:
    nodes = max((-(-sample.ranks // sample.ranks_per_node) for sample in timed), default=1)
    return f"{number} processes on {nodes} node{'s' * (nodes > 1)}"
