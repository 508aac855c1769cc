"""When a rank of a pipeline computes within a step, and when it waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.strategies.stepper import TimeSpans


class StageTimer:
    """Notes spans of time per step, once it is started: on the host's clock, or as events of the current CUDA stream.

    A receive that was waited for on the stream lies before a span that begins after it, so that spans hold computation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_running = False
        self._step_starts: list[Any] = []
        self._step_spans: list[list[tuple[Any, Any]]] = []

    def start(self) -> None:
        """Note the steps that begin from now on."""
        self._is_running = True

    def begin_step(self) -> None:
        if self._is_running:
            self._step_starts.append(self._record_time())
            self._step_spans.append([])

    @contextlib.contextmanager
    def record_span(self) -> Iterator[None]:
        if not self._is_running:
            yield
            return
        start = self._record_time()
        yield
        self._step_spans[-1].append((start, self._record_time()))

    def stop(self) -> list[TimeSpans]:
        """Of each step since it was started, in seconds from the first one's beginning; they are forgotten."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spans = [
            [
                (
                    self._compute_elapsed_s(self._step_starts[0], start),
                    self._compute_elapsed_s(self._step_starts[0], end),
                )
                for start, end in step_spans
            ]
            for step_spans in self._step_spans
        ]
        self._is_running, self._step_starts, self._step_spans = False, [], []
        return spans

    def _record_time(self) -> Any:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        return time.perf_counter()

    def _compute_elapsed_s(self, start: Any, end: Any) -> float:
        elapsed_s: float = start.elapsed_time(end) / 1000 if self._device.type == "cuda" else end - start
        return elapsed_s
