"""One calibration from beginning to end: everything that is timed, and whether others disturbed it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from bench.calibration.collectives import measure_collectives
from bench.calibration.compute import measure_compute
from bench.calibration.noise import ProcessorWait, find_disturbances, time_reference
from bench.calibration.processes import CalibrationProcess, run_local_processes
from bench.calibration.sample import CalibrationSample
from bench.rank import environment


@dataclass(frozen=True)
class CalibrationSettings:
    """What is to be timed."""

    device_type: str
    """cpu or cuda."""
    cpu_threads: int
    """That a process computes with on a CPU."""
    times_compute: bool
    times_collectives: bool
    local_ranks: int
    """Processes to start for collectives, where nobody has started them; fewer than 2 time none."""
    is_quick: bool


@dataclass
class CalibrationMeasurements:
    """What was timed."""

    device: torch.device
    processes_text: str = "1 process"
    """Who communicated, in words."""
    reference_samples: list[CalibrationSample] = field(default_factory=list)
    """The same measurement, again and again."""
    compute_samples: list[CalibrationSample] = field(default_factory=list)
    collective_samples: list[CalibrationSample] = field(default_factory=list)
    wait_share: float = 0.0
    """Share of the time in which other processes had this one's processor."""

    @property
    def samples(self) -> list[CalibrationSample]:
        """All of it."""
        return [*self.reference_samples, *self.compute_samples, *self.collective_samples]


def run_calibration(
    settings: CalibrationSettings, process: CalibrationProcess | None
) -> CalibrationMeasurements | None:
    """Time everything; None on a process that only communicates with the one that leads.

    On a machine that is busy from the beginning that is all that is found: the rest would take minutes for nothing.

    Parameters
    ----------
    process: Process or None
        This one among those that torchrun or srun started; None to start others where they are needed.
    """
    if process is not None and process.rank > 0:
        measure_rank_collectives(process, settings)
        return None
    torch.set_num_threads(settings.cpu_threads)
    is_gpu = settings.device_type == "cuda"
    device = (
        process.select_device(settings.device_type)
        if process
        else torch.device("cuda", 0)
        if is_gpu
        else torch.device("cpu")
    )
    measurements, processor_wait = CalibrationMeasurements(device), ProcessorWait()
    with processor_wait.measure():
        measurements.reference_samples.append(time_reference(device))
    if process is None and find_disturbances(measurements.reference_samples, processor_wait.share):
        measurements.wait_share = processor_wait.share
        return measurements
    if settings.times_collectives and (process is not None or settings.local_ranks > 1):
        measurements.collective_samples = (
            measure_rank_collectives(process, settings)
            if process
            else run_local_processes(settings.local_ranks, measure_rank_collectives, settings)
        )
        measurements.processes_text = _describe_processes(
            process.world_size if process else settings.local_ranks, measurements.collective_samples
        )
        with processor_wait.measure():
            measurements.reference_samples.append(time_reference(device))
    if settings.times_compute:
        with processor_wait.measure():
            measurements.compute_samples = measure_compute(
                device, settings.cpu_threads, quick=settings.is_quick, on_progress=print_progress
            )
            measurements.reference_samples.append(time_reference(device))
    measurements.wait_share = processor_wait.share
    return measurements


def measure_rank_collectives(process: CalibrationProcess, settings: CalibrationSettings) -> list[CalibrationSample]:
    """One process's part in the timing of collectives; all get the samples."""
    torch.set_num_threads(settings.cpu_threads)
    device = process.select_device(settings.device_type)
    with process.init_process_group(device):
        host, is_leader = environment.get_host_name(), process.rank == 0
        return measure_collectives(
            device, host, quick=settings.is_quick, on_progress=print_progress if is_leader else _ignore_progress
        )


def print_progress(text: str) -> None:
    """Tell whoever waits what is being timed."""
    print(text, file=sys.stderr, flush=True)


def _ignore_progress(text: str) -> None:
    pass


def _describe_processes(process_count: int, collective_samples: list[CalibrationSample]) -> str:
    nodes = max((-(-sample.ranks // sample.ranks_per_node) for sample in collective_samples), default=1)
    return f"{process_count} processes on {nodes} node{'s' * (nodes > 1)}"
