"""Step times without disturbing the steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch


class StepClock(ABC):
    """Times consecutive steps; nothing is waited for until `read_step_times_s`."""

    @abstractmethod
    def tick(self) -> None:
        """Mark the boundary between two steps: once before the first and once after each."""

    @abstractmethod
    def read_step_times_s(self) -> list[float]:
        """Seconds each step took, once the device has finished them all."""


class CpuStepClock(StepClock):
    """The host's monotonic clock: CPU steps are finished when they return."""

    def __init__(self) -> None:
        self._boundaries_s: list[float] = []

    def tick(self) -> None:
        """Read the clock."""
        self._boundaries_s.append(time.perf_counter())

    def read_step_times_s(self) -> list[float]:
        """Differences of consecutive readings."""
        return [after - before for before, after in zip(self._boundaries_s, self._boundaries_s[1:], strict=False)]


class CudaStepClock(StepClock):
    """One event per boundary, recorded in the stream, so that the host can run ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def tick(self) -> None:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def read_step_times_s(self) -> list[float]:
        """Wait for the device once, then read the time between consecutive events."""
        torch.cuda.synchronize(self._device)
        event_pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) / 1000 for before, after in event_pairs]


def build_step_clock(device: torch.device) -> StepClock:
    """The clock for a device."""
    return CudaStepClock(device) if device.type == "cuda" else CpuStepClock()
