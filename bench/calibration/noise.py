"""Whether a machine was quiet while it was measured: how much timings scatter, change, and wait for a processor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.calibration.sample import COLLECTIVE, LAUNCH, MATMUL, SAMPLE_KINDS, CalibrationSample, build_timer

MAX_SPREAD_BY_KIND = {COLLECTIVE: 0.35, LAUNCH: 0.20}
MAX_OTHER_SPREAD = 0.15
"""What the spread of repeated timings may be (half the distance between the quartiles, as a share of the median): that
of the median measurement of a kind. Some scatter more on any machine: small messages among processes that must be
woken for each, operators timed inside of real steps."""

MAX_DRIFT_BY_KIND = {COLLECTIVE: 1.0}
MAX_OTHER_DRIFT = 0.30
"""By how much the same measurement may differ from one time to another. A core of a shared host changes its speed by a
quarter from second to second, over which a calibration of minutes averages; a step of gloo waits for a process to be
woken."""

MAX_WAIT_SHARE = 0.05
"""Share of the time in which the process that measures may have to wait while others have its processor."""

REFERENCE_NAME = "reference"
"""Name of the measurement that is repeated at the beginning, in the middle and at the end."""

REFERENCE_SIZE, REFERENCE_REPETITIONS = {"cpu": 512, "cuda": 4096}, {"cpu": 1000, "cuda": 400}
"""Elements along each side, and products: together some seconds on a CPU."""


@dataclass(frozen=True)
class Disturbance:
    """Something that says that the machine was not quiet."""

    description: str
    """The measurement and what of it, in words."""
    value: float
    limit: float

    def __str__(self) -> str:
        return f"{self.description} is {100 * self.value:.0f} %, above the limit of {100 * self.limit:.0f} %"


class ProcessorWait:
    """How long this process was ready to compute while others computed, as Linux counts it; 0 where it does not."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.elapsed_s = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        waited_before_s, start_s = _read_run_queue_s(), time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += _read_run_queue_s() - waited_before_s
            self.elapsed_s += time.perf_counter() - start_s

    @property
    def share(self) -> float:
        """Of all the time that was watched."""
        return self.waited_s / self.elapsed_s if self.elapsed_s else 0.0


def _read_run_queue_s() -> float:
    """Seconds that this process's first thread has waited for a processor (``schedstat`` in proc(5))."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def time_reference(device: torch.device) -> CalibrationSample:
    """Time one matrix product, always the same, to be compared with itself later."""
    size = REFERENCE_SIZE[device.type]
    left, right, product = (torch.randn(size, size, device=device) for _ in range(3))
    seconds = build_timer(device).time_repetitions(
        [lambda: torch.mm(left, right, out=product)], REFERENCE_REPETITIONS[device.type]
    )
    bytes_moved = 3.0 * 4 * size**2
    return CalibrationSample(MATMUL, REFERENCE_NAME, "fp32", (1, size, size, size), 2.0 * size**3, bytes_moved, seconds)


def find_disturbances(samples: Sequence[CalibrationSample], wait_share: float = 0.0) -> list[Disturbance]:
    """What says that the machine was not quiet; nothing, if it was.

    Parameters
    ----------
    samples: sequence of Sample
        In the order they were timed. The same measurement may occur several times, to be compared.
    wait_share: float
        Share of the time that the process that measured had to wait for a processor.
    """
    disturbances = []
    if wait_share > MAX_WAIT_SHARE:
        disturbances.append(
            Disturbance("the time in which other processes had the processor", wait_share, MAX_WAIT_SHARE)
        )
    for kind in SAMPLE_KINDS:
        disturbances += _find_scattered([sample for sample in samples if sample.kind == kind], find_spread_limit(kind))
    for repeated_samples in _group_repeated(samples):
        limit = MAX_DRIFT_BY_KIND.get(repeated_samples[0].kind, MAX_OTHER_DRIFT)
        medians = [sample.median_s for sample in repeated_samples]
        drift = max(medians) / min(medians) - 1
        if drift > limit:
            description = f"the difference between {describe_sample(repeated_samples[0])} at one time and another"
            disturbances.append(Disturbance(description, drift, limit))
    return disturbances


def find_spread_limit(kind: str) -> float:
    """The limit for the typical spread of one kind of measurement."""
    return MAX_SPREAD_BY_KIND.get(kind, MAX_OTHER_SPREAD)


def _find_scattered(samples: Sequence[CalibrationSample], limit: float) -> list[Disturbance]:
    """What is typical of one kind, if it is above the limit."""
    if not samples:
        return []
    typical_spread = statistics.median(sample.spread for sample in samples)
    if typical_spread <= limit:
        return []
    worst_sample = max(samples, key=lambda sample: sample.spread)
    example_text = f"the worst, of {describe_sample(worst_sample)}, is {100 * worst_sample.spread:.0f} %"
    return [
        Disturbance(
            f"the typical spread of {len(samples)} {samples[0].kind} measurements ({example_text})",
            typical_spread,
            limit,
        )
    ]


def _group_repeated(samples: Sequence[CalibrationSample]) -> list[list[CalibrationSample]]:
    """Measurements that were made more than once to be compared. Operators of steps that are alike may be different."""
    samples_by_key: dict[tuple[object, ...], list[CalibrationSample]] = {}
    for sample in samples:
        if sample.name == REFERENCE_NAME or sample.kind == COLLECTIVE:
            key = (sample.name, sample.dims, sample.ranks, sample.ranks_per_node)
            samples_by_key.setdefault(key, []).append(sample)
    return [repeated_samples for repeated_samples in samples_by_key.values() if len(repeated_samples) > 1]


def describe_sample(sample: CalibrationSample) -> str:
    """A measurement in a few words."""
    if sample.kind == COLLECTIVE:
        return f"{sample.name} of {sample.bytes_moved:,.0f} bytes among {sample.ranks} ranks"
    return f"{sample.kind} {sample.name} {sample.format} {'x'.join(str(size) for size in sample.dims)}"
