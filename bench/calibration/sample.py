"""One thing that was timed for a calibration."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MATMUL, ATTENTION, SUSTAINED, MEMORY, OPERATOR, OPTIMIZER, LAUNCH, COLLECTIVE = (
    "matmul",
    "attention",
    "sustained",
    "memory",
    "operator",
    "optimizer",
    "launch",
    "collective",
)
SAMPLE_KINDS = (MATMUL, ATTENTION, SUSTAINED, MEMORY, OPERATOR, OPTIMIZER, LAUNCH, COLLECTIVE)


@dataclass(frozen=True)
class CalibrationSample:
    """Repeated timings of one operation at one size."""

    kind: str
    """One of `SAMPLE_KINDS`."""
    name: str
    """Operator (``mm``, ``gelu_backward``), optimizer and its implementation, or collective (``all-gather``). Of what
    is kept up for seconds: the kind that was timed in short bursts before."""
    format: str
    """fp32, tf32, bf16 or fp16; ``bytes`` for collectives."""
    dims: tuple[int, ...]
    """Of a matrix product: batch, m, n, k, and 1 if the left operand is transposed. Of attention: batch, heads,
    queries, keys, head dimension. Else the shape or the number of elements."""
    flops: float
    bytes_moved: float
    """Operands read and results written, each once. Of a collective: the whole message, as
    `bench.prediction.cost.collectives` counts it."""
    seconds: tuple[float, ...]
    """Each repetition; of a collective that of the slowest rank."""
    ranks: int = 1
    ranks_per_node: int = 1

    @property
    def median_s(self) -> float:
        """Median of the repetitions in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the repetitions, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median_s


# --- Timing work on a device: the host's clock on a CPU, events in the stream on a GPU.

TimedCall = Callable[[], object]

WARM_UP_CALLS = 2
"""Calls before anything is timed: libraries choose their kernels in the first."""


class CallTimer(ABC):
    """Times calls on one device."""

    min_timed_s: float
    """Shortest stretch that is timed at once: below it, several calls are timed together."""

    @abstractmethod
    def time_calls(self, calls: Sequence[TimedCall]) -> float:
        """Seconds all calls take, one after the other."""

    def time_repetitions(self, calls: Sequence[TimedCall], repetitions: int) -> tuple[float, ...]:
        """Seconds of one call, as often as it is repeated.

        Parameters
        ----------
        calls: sequence
            The same work on different operands, taken in turn: what one call leaves in the caches is of no use to the
            next.
        """
        for index in range(WARM_UP_CALLS):
            calls[index % len(calls)]()
        call_s = self.time_calls(calls[:1])
        calls_together = max(1, min(MAX_CALLS_TOGETHER, round(self.min_timed_s / max(call_s, 1e-9))))
        first_index = 0
        seconds = []
        for _ in range(repetitions):
            timed_calls = [calls[(first_index + index) % len(calls)] for index in range(calls_together)]
            first_index += calls_together
            seconds.append(self.time_calls(timed_calls) / calls_together)
        return tuple(seconds)


MAX_CALLS_TOGETHER = 200
"""Calls that are timed together at most."""


class CpuTimer(CallTimer):
    """The host's monotonic clock: work on a CPU is done when its call returns."""

    min_timed_s = 0.5e-3

    def time_calls(self, calls: Sequence[TimedCall]) -> float:
        start_s = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start_s


class CudaTimer(CallTimer):
    """Events before and after; the host runs ahead of the device."""

    min_timed_s = 2e-3

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time_calls(self, calls: Sequence[TimedCall]) -> float:
        stream = torch.cuda.current_stream(self._device)
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record(stream)
        for call in calls:
            call()
        end_event.record(stream)
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event)) / 1000


def build_timer(device: torch.device) -> CallTimer:
    """The timer for a device."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()
