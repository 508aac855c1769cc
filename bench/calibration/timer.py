"""Timing work on a device: the host's clock on a CPU, events in the stream on a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

WARM_UP = 2
"""Calls before anything is timed: libraries choose their kernels in the first."""


class Timer(ABC):
    """Times calls on one device."""

    least_s: float
    """Shortest stretch that is timed at once: below it, several calls are timed together."""

    @abstractmethod
    def stretch(self, calls: Sequence[Call]) -> float:
        """Seconds all calls take, one after the other."""

    def repeated(self, calls: Sequence[Call], repetitions: int) -> tuple[float, ...]:
        """Seconds of one call, as often as it is repeated.

        Parameters
        ----------
        calls: sequence
            The same work on different operands, taken in turn: what one call leaves in the caches is of no use to the
            next.
        """
        for number in range(WARM_UP):
            calls[number % len(calls)]()
        once = self.stretch(calls[:1])
        together = max(1, min(MOST_TOGETHER, round(self.least_s / max(once, 1e-9))))
        first = 0
        found = []
        for _ in range(repetitions):
            stretch = [calls[(first + number) % len(calls)] for number in range(together)]
            first += together
            found.append(self.stretch(stretch) / together)
        return tuple(found)


MOST_TOGETHER = 200
"""Calls that are timed together at most."""


class CpuTimer(Timer):
    """The host's monotonic clock: work on a CPU is done when its call returns."""

    least_s = 0.5e-3

    def stretch(self, calls: Sequence[Call]) -> float:
        """As `Timer` says."""
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start


class CudaTimer(Timer):
    """Events before and after; the host runs ahead of the device."""

    least_s = 2e-3

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stretch(self, calls: Sequence[Call]) -> float:
        """As `Timer` says."""
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        for call in calls:
            call()
        after.record(stream)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000


def timer_of(device: torch.device) -> Timer:
    """The timer for a device."""
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()
