"""What a simulated rank holds: under names, by part of memory and by stream, with its peaks.

Memory changes when the processor says so, in its order, as in PyTorch's caching allocator: what another stream still
uses when it is freed stays out of use for a while (*active*, not *allocated*).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.prediction.prediction import MEMORY_PARTS
from bench.prediction.simulation.allocator_replay import AllocatorReplay
from bench.strategies.step_plan import (
    ALL_GATHER_STREAM,
    CAST_STREAM,
    COMPUTE_STREAM,
    GRADIENT_MEMORY,
    NCCL_STREAM,
    OPTIMIZER_MEMORY,
    REDUCE_STREAM,
    REPLICA_STREAM,
)

STREAMS = (COMPUTE_STREAM, ALL_GATHER_STREAM, REDUCE_STREAM, REPLICA_STREAM, CAST_STREAM, NCCL_STREAM)

ACTIVATION_MEMORY, TEMPORARY_MEMORY = "activations", "temporaries"

GRADIENT_NAME_PREFIXES = ("gradients ", "gradient shard ")
"""Beginnings of the names under which plans keep gradients from step to step; their buckets have others."""


NEAR_PEAK_SHARE = 0.9
"""Of the peak of what is allocated, from which on `RankMemory.active_near_peak_bytes` counts."""


@dataclass
class MemoryPeak:
    """The highest memory so far, and what it consists of."""

    size: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    phase: str = "forward"
    module: str = ""


class RankMemory:
    """The memory of one rank, and the clock it goes by: the processor's, and how far each stream has come."""

    def __init__(self, replay: AllocatorReplay | None) -> None:
        self._replay = replay
        self._allocations: dict[str, tuple[float, str, str]] = {}
        self._part_bytes = dict.fromkeys(MEMORY_PARTS, 0.0)
        self._allocated_bytes = 0.0
        self._late_frees: list[tuple[float, float, str]] = []
        """When another stream is done with what was freed, how much that is and the stream it was allocated on."""
        self._late_bytes = dict.fromkeys(STREAMS, 0.0)
        self.peak = MemoryPeak()
        self.phase_peaks: dict[str, float] = {}
        self.initial_bytes = 0.0
        """Allocated before the first step, which is not the one that is simulated."""
        self.early_bytes = 0.0
        """More than in the step that is simulated, in the second."""
        self.peak_active_bytes = 0.0
        self.active_near_peak_bytes = 0.0
        """The most that was active while nearly as much was allocated as at the peak."""
        self._side_stream_bytes = 0.0
        self._peak_compute_stream_bytes = 0.0
        self._side_streams: dict[str, tuple[float, float]] = {}
        """What is allocated on each stream but the one that computes, and the most that was active on it so far."""
        self.phase, self.module = "forward", ""
        self.processor_time = 0.0
        self.stream_times = dict.fromkeys(STREAMS, 0.0)

    def hold(self, name: str, size: float, part: str, stream: str) -> None:
        """Allocate bytes of a part under a name. What is held under it already is freed first."""
        if name in self._allocations:
            self.free(name)
        self._allocations[name] = (size, part, stream)
        self._part_bytes[part] += size
        self._allocated_bytes += size
        if stream != COMPUTE_STREAM:
            self._collect_late_frees()
            level, peak = self._side_streams.get(stream, (0.0, 0.0))
            level += size
            self._side_streams[stream] = level, max(peak, level + self._late_bytes[stream])
            self._side_stream_bytes += size
        self.note_peak(0.0, 0.0)
        if self._replay is not None:
            self._replay.hold(name, size, stream, self.processor_time)

    def free(self, name: str, *, after: str | None = None) -> None:
        allocation = self._allocations.pop(name, None)
        if allocation is None:
            return
        size, part, stream = allocation
        self._part_bytes[part] -= size
        self._allocated_bytes -= size
        if stream != COMPUTE_STREAM:
            level, peak = self._side_streams[stream]
            self._side_streams[stream] = level - size, peak
            self._side_stream_bytes -= size
        is_late = after is not None and self.stream_times[after] > self.processor_time
        if after is not None and is_late:
            heapq.heappush(self._late_frees, (self.stream_times[after], size, stream))
            self._late_bytes[stream] += size
        if self._replay is not None:
            self._replay.free(name, self.stream_times[after] if after is not None and is_late else None)

    def note_peak(self, extra_bytes: float, lasting_bytes: float, gradient_bytes: float = 0.0) -> None:
        """Note a new peak, `extra_bytes` what is allocated now; `lasting_bytes` of it in storages that stay."""
        level = self._allocated_bytes + extra_bytes
        if level > self.phase_peaks.get(self.phase, 0.0):
            self.phase_peaks[self.phase] = level
        if level > self.peak.size:
            parts = dict(self._part_bytes)
            parts[ACTIVATION_MEMORY] += lasting_bytes
            parts[GRADIENT_MEMORY] += gradient_bytes
            parts[TEMPORARY_MEMORY] += extra_bytes - lasting_bytes - gradient_bytes
            self.peak = MemoryPeak(level, parts, self.phase, self.module)
        if self._late_frees:
            self._collect_late_frees()
        compute_bytes = level - self._side_stream_bytes + self._late_bytes[COMPUTE_STREAM]
        if compute_bytes > self._peak_compute_stream_bytes:
            self._peak_compute_stream_bytes = compute_bytes
        active_bytes = level + sum(self._late_bytes.values()) if self._late_frees else level
        if active_bytes > self.peak_active_bytes:
            self.peak_active_bytes = active_bytes
        if active_bytes > self.active_near_peak_bytes and level >= NEAR_PEAK_SHARE * self.peak.size:
            self.active_near_peak_bytes = active_bytes

    def _collect_late_frees(self) -> None:
        """What no stream uses any more is not active any more."""
        while self._late_frees and self._late_frees[0][0] <= self.processor_time:
            _, size, stream = heapq.heappop(self._late_frees)
            self._late_bytes[stream] -= size

    @property
    def stream_peaks_bytes(self) -> float:
        """What was active at most on each stream, all together: what one has cached the others cannot use."""
        return self._peak_compute_stream_bytes + sum(peak for _, peak in self._side_streams.values())

    def note_initial_bytes(self) -> None:
        """What is held now is there before the first step, too, but for optimizer state and gradients that are kept."""
        if self._replay is not None:
            self._replay.end_building()
        self.initial_bytes = sum(
            size
            for name, (size, part, _) in self._allocations.items()
            if part != OPTIMIZER_MEMORY and not name.startswith(GRADIENT_NAME_PREFIXES)
        )

    def grow_allocation(self, name: str, size: float, part: str) -> None:
        """Hold more under a name, without a look at the peak: whoever calls has taken it into account."""
        self._allocations[name] = (self._allocations.get(name, (0.0, part))[0] + size, part, COMPUTE_STREAM)
        self._part_bytes[part] += size
        self._allocated_bytes += size
        if self._replay is not None:
            self._replay.grow(name, size, self.processor_time)

    def add_activations(self, net_bytes: float, lasting_net_bytes: float) -> None:
        """What the model's own computation has made and not freed; some of it in storages that stay."""
        self._allocated_bytes += net_bytes
        self._part_bytes[ACTIVATION_MEMORY] += lasting_net_bytes
        self._part_bytes[TEMPORARY_MEMORY] += net_bytes - lasting_net_bytes

    def list_sizes(self) -> tuple[list[float], int]:
        """Bytes, beside those that have names, and how many of them are levels: the others are of parts, which may give
        to each other what is held, and what the replayed allocator counts."""
        levels = [
            *(level for level, _ in self._side_streams.values()),
            *(self._allocated_bytes, self._side_stream_bytes, *self._late_bytes.values()),
        ]
        counts = () if self._replay is None else self._replay.allocator.get_counts()
        return [*levels, *self._part_bytes.values(), *counts], len(levels)

    def set_sizes(self, sizes: Iterator[float]) -> None:
        """Hold other sizes, in the order of `list_sizes`."""
        self._side_streams = {name: (next(sizes), peak) for name, (_, peak) in self._side_streams.items()}
        self._allocated_bytes, self._side_stream_bytes = next(sizes), next(sizes)
        self._late_bytes = {stream: next(sizes) for stream in self._late_bytes}
        self._part_bytes = {part: next(sizes) for part in self._part_bytes}
        if self._replay is not None:
            self._replay.allocator.set_counts(sizes)
