"""Whether a machine was quiet while it was measured: how much timings scatter, change, and wait for a processor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.calibration.sample import COLLECTIVE, KINDS, LAUNCH, MATMUL, Sample
from bench.calibration.timer import timer_of

SPREAD_LIMIT = {COLLECTIVE: 0.35, LAUNCH: 0.20}
OTHER_SPREAD_LIMIT = 0.15
"""What the spread of repeated timings may be (half the distance between the quartiles, as a share of the median): that
of the median measurement of a kind. Some scatter more on any machine: small messages among processes that must be
woken for each, operators timed inside of real steps."""

DRIFT_LIMIT = {COLLECTIVE: 1.0}
OTHER_DRIFT_LIMIT = 0.30
"""By how much the same measurement may differ from one time to another. A core of a shared host changes its speed by a
quarter from second to second, over which a calibration of minutes averages; a step of gloo waits for a process to be
woken."""

WAITING_LIMIT = 0.05
"""Share of the time in which the process that measures may have to wait while others have its processor."""

REFERENCE = "reference"
"""Name of the measurement that is repeated at the beginning, in the middle and at the end."""

REFERENCE_SIZE, REFERENCE_REPETITIONS = {"cpu": 512, "cuda": 4096}, {"cpu": 1000, "cuda": 400}
"""Elements along each side, and products: together some seconds on a CPU."""


@dataclass(frozen=True)
class Disturbance:
    """Something that says that the machine was not quiet."""

    what: str
    """The measurement and what of it, in words."""
    value: float
    limit: float

    def __str__(self) -> str:
        return f"{self.what} is {100 * self.value:.0f} %, above the limit of {100 * self.limit:.0f} %"


class Waiting:
    """How long this process was ready to compute while others computed, as Linux counts it; 0 where it does not."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.elapsed_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count what happens within."""
        waited, start = _run_queue_s(), time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += _run_queue_s() - waited
            self.elapsed_s += time.perf_counter() - start

    @property
    def share(self) -> float:
        """Of all the time that was watched."""
        return self.waited_s / self.elapsed_s if self.elapsed_s else 0.0


def _run_queue_s() -> float:
    """Seconds that this process's first thread has waited for a processor (``schedstat`` in proc(5))."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def reference(device: torch.device) -> Sample:
    """Time one matrix product, always the same, to be compared with itself later."""
    size = REFERENCE_SIZE[device.type]
    left, right, product = (torch.randn(size, size, device=device) for _ in range(3))
    seconds = timer_of(device).repeated(
        [lambda: torch.mm(left, right, out=product)], REFERENCE_REPETITIONS[device.type]
    )
    moved = 3.0 * 4 * size**2
    return Sample(MATMUL, REFERENCE, "fp32", (1, size, size, size), 2.0 * size**3, moved, seconds)


def disturbances(samples: Sequence[Sample], waiting: float = 0.0) -> list[Disturbance]:
    """What says that the machine was not quiet; nothing, if it was.

    Parameters
    ----------
    samples: sequence of Sample
        In the order they were timed. The same measurement may occur several times, to be compared.
    waiting: float
        Share of the time that the process that measured had to wait for a processor.
    """
    found = []
    if waiting > WAITING_LIMIT:
        found.append(Disturbance("the time in which other processes had the processor", waiting, WAITING_LIMIT))
    for kind in KINDS:
        found += _scattered([sample for sample in samples if sample.kind == kind], spread_limit(kind))
    for several in _repeated(samples):
        limit = DRIFT_LIMIT.get(several[0].kind, OTHER_DRIFT_LIMIT)
        medians = [sample.median_s for sample in several]
        drift = max(medians) / min(medians) - 1
        if drift > limit:
            what = f"the difference between {described(several[0])} at one time and another"
            found.append(Disturbance(what, drift, limit))
    return found


def spread_limit(kind: str) -> float:
    """The limit for the typical spread of one kind of measurement."""
    return SPREAD_LIMIT.get(kind, OTHER_SPREAD_LIMIT)


def _scattered(samples: Sequence[Sample], limit: float) -> list[Disturbance]:
    """What is typical of one kind, if it is above the limit."""
    if not samples:
        return []
    typical = statistics.median(sample.spread for sample in samples)
    if typical <= limit:
        return []
    worst = max(samples, key=lambda sample: sample.spread)
    example = f"the worst, of {described(worst)}, is {100 * worst.spread:.0f} %"
    return [
        Disturbance(f"the typical spread of {len(samples)} {samples[0].kind} measurements ({example})", typical, limit)
    ]


def _repeated(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Measurements that were made more than once to be compared. Operators of steps that are alike may be different."""
    found: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        if sample.name == REFERENCE or sample.kind == COLLECTIVE:
            key = (sample.name, sample.dims, sample.ranks, sample.ranks_per_node)
            found.setdefault(key, []).append(sample)
    return [several for several in found.values() if len(several) > 1]


def described(sample: Sample) -> str:
    """A measurement in a few words."""
    if sample.kind == COLLECTIVE:
        return f"{sample.name} of {sample.bytes_moved:,.0f} bytes among {sample.ranks} ranks"
    return f"{sample.kind} {sample.name} {sample.format} {'x'.join(str(size) for size in sample.dims)}"
