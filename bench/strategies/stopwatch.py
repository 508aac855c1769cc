"""When a rank computes within a step, and when it waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.strategies.stepper import Spans


class Stopwatch:
    """Notes spans of time per step, once it is started: on the host's clock, or as events of the current CUDA stream.

    A receive that was waited for on the stream lies before a span that begins after it, so that spans hold computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runs = False
        self._beginnings: list[Any] = []
        self._spans: list[list[tuple[Any, Any]]] = []

    def start(self) -> None:
        """Note the steps that begin from now on."""
        self._runs = True

    def begin_step(self) -> None:
        """A step begins."""
        if self._runs:
            self._beginnings.append(self._mark())
            self._spans.append([])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Something is computed within."""
        if not self._runs:
            yield
            return
        start = self._mark()
        yield
        self._spans[-1].append((start, self._mark()))

    def stop(self) -> list[Spans]:
        """Of each step since it was started, in seconds from the first one's beginning; they are forgotten."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spans = [
            [
                (self._seconds(self._beginnings[0], start), self._seconds(self._beginnings[0], end))
                for start, end in step
            ]
            for step in self._spans
        ]
        self._runs, self._beginnings, self._spans = False, [], []
        return spans

    def _mark(self) -> Any:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        return time.perf_counter()

    def _seconds(self, start: Any, end: Any) -> float:
        seconds: float = start.elapsed_time(end) / 1000 if self._device.type == "cuda" else end - start
        return seconds
