"""One rank on which a step is simulated: its memory, its streams and the processor that feeds them.

Time passes on every stream by itself.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from bench.prediction.prediction import TimelineSpan
from bench.prediction.simulation.allocator_replay import AllocatorReplay
from bench.prediction.simulation.caching_allocator import MIN_OWN_SEGMENT_BYTES
from bench.prediction.simulation.rank_memory import RankMemory
from bench.prediction.trace.chunks import Chunk
from bench.prediction.trace.kernels import FloatArray
from bench.prediction.trace.trace import BlockPlace
from bench.strategies.step_plan import ALL_GATHER_MEMORY, COMPUTE_STREAM, NCCL_STREAM, REDUCE_INPUT, REDUCTION_MEMORY

CollectiveSeconds = Callable[[str, float, str], float]
"""Time of a collective: kind, bytes, group."""


@dataclass(frozen=True)
class RankSpeed:
    """How fast the rank is. All zero where nobody knows: memory is the same."""

    collective_seconds: CollectiveSeconds = lambda kind, size, group: 0.0
    copy_s_per_byte: float = 0.0
    reduce_input_s_per_byte: float = 0.0
    """The same of gradients into what FSDP2 reduces."""
    launch_s: float = 0.0
    """Of one kernel, on the processor."""
    is_cpu: bool = False
    """The processor that launches is the device that computes: it does one after the other."""
    unit_hooks_s: float = 0.0
    """Of a unit's hooks, on the processor."""
    min_kernel_s: float = 0.0
    """Shortest time of a kernel on the device."""
    overlap_loss: float = 0.0
    """Share of its speed that computation loses while something is sent."""
    transfer_s_per_byte: float = 0.0
    """Between the device and its machine's memory, in one direction."""
    records_nccl_stream: bool = False
    """What a collective used is free only when NCCL has done all it was given."""
    retry_s_per_byte: float = 0.0
    """Above 0: the device stands still for so long whenever a large buffer is allocated beside the computation."""


@dataclass(frozen=True)
class RankState:
    """All that what happens next to a rank depends on, and the seconds it has spent."""

    allocations: Mapping[str, tuple[float, str, str]]
    """Bytes, part and stream by name."""
    events: Mapping[str, tuple[float]]
    """Their times by name."""
    labels: tuple[object, ...]
    """Of what the following numbers are: those of two states can be compared where these are the same."""
    sizes: FloatArray
    """Bytes: of all allocations together, of each stream and each part; then what a replayed allocator counts."""
    num_levels: int
    """Of `sizes`, all but the parts: parts may give to each other what is held."""
    times: FloatArray
    """Of the processor, of each stream and communicator, and of what is still to come."""
    spent_seconds: FloatArray


class SimulatedRank(RankMemory):
    """Implements `bench.strategies.step_plan.PlanDevice`, and simulates the model's own segments in between."""

    def __init__(
        self,
        speed: RankSpeed,
        *,
        timeline: bool = False,
        replay: AllocatorReplay | None = None,
        keeps_frozen_inputs: bool = False,
    ) -> None:
        super().__init__(replay)
        self._speed = speed
        self.keeps_frozen_inputs = keeps_frozen_inputs
        """Inputs of frozen units, and their gradients, stay until backward ends."""
        self.place: BlockPlace = None
        """Where the computation is in the whole model."""
        self._event_times: dict[str, float] = {}
        self._late_free_times: deque[float] = deque()
        self.spent_seconds = dict.fromkeys(
            ("compute", "optimizer", "exposed", "launch", "communication", "transfer", "carried"), 0.0
        )
        self._timeline: list[TimelineSpan] | None = [] if timeline else None
        self._collective_spans: deque[tuple[float, float]] = deque()
        self._communicator_times: dict[str, float] = {}
        self.updated_on_host = False
        self.largest_retried_bytes = 0.0
        """Of a buffer beside the computation, among those for which the allocator may have to retry."""

    @property
    def timeline(self) -> tuple[TimelineSpan, ...]:
        """What happened, if it was to be remembered."""
        return tuple(self._timeline or ())

    # Memory

    def allocate(self, name: str, size: float, part: str, *, stream: str = COMPUTE_STREAM) -> None:
        """As `PlanDevice` says. What is held under the name already is freed first."""
        self.hold(name, size, part, stream)
        if part in (ALL_GATHER_MEMORY, REDUCTION_MEMORY) and size >= MIN_OWN_SEGMENT_BYTES:
            self.largest_retried_bytes = max(self.largest_retried_bytes, size)
            if self._speed.retry_s_per_byte:
                self._retry_allocation(size)

    def _retry_allocation(self, size: float) -> None:
        """The allocator waits for all streams, gives back what it caches and asks the device anew."""
        start = self.stream_times[COMPUTE_STREAM]
        end = max(self.processor_time, *self.stream_times.values()) + size * self._speed.retry_s_per_byte
        self.processor_time = end
        for stream in self.stream_times:
            self.stream_times[stream] = end
        self.spent_seconds["launch"] += end - start
        if self._timeline is not None:
            self._timeline.append(TimelineSpan(COMPUTE_STREAM, f"allocator {self.module}", "wait", start, end))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began, until the computing stream is done."""
        return self.stream_times[COMPUTE_STREAM]

    # State

    @property
    def is_recorded(self) -> bool:
        """Whether everything that happens is written down."""
        return self._timeline is not None

    @property
    def is_state_whole(self) -> bool:
        """Whether `get_state` tells all that happens next apart, whatever blocks it concerns: nothing is written down,
        no allocator is replayed and no inputs of frozen units are kept."""
        return not self.is_recorded and self._replay is None and not self.keeps_frozen_inputs

    def get_state(self) -> RankState:
        """As it is now."""
        sizes, num_levels = self.list_sizes()
        communicators, late_frees = sorted(self._communicator_times.items()), sorted(self._late_frees)
        replayed_labels, replayed_times = self._replay.get_arrangement() if self._replay is not None else ([], [])
        labels = (
            *self._side_streams,
            *(group for group, _ in communicators),
            *((size, stream) for _, size, stream in late_frees),
            *(len(self._late_free_times), len(self._collective_spans)),
            *replayed_labels,
        )
        times = [
            *(time for _, time in communicators),
            *self._late_free_times,
            *(time for time, *_ in late_frees),
            *itertools.chain.from_iterable(self._collective_spans),
            *replayed_times,
            self.processor_time,
            *self.stream_times.values(),
        ]
        return RankState(
            dict(self._allocations),
            {name: (time,) for name, time in self._event_times.items()},
            labels,
            np.array(sizes),
            num_levels,
            np.array(times),
            np.array(list(self.spent_seconds.values())),
        )

    def set_state(self, state: RankState) -> None:
        """Go on from a state that has the labels of the present one."""
        self._allocations = dict(state.allocations)
        self._event_times = {name: time for name, (time,) in state.events.items()}
        self.set_sizes(iter(state.sizes.tolist()))
        times = iter(state.times.tolist())
        self._communicator_times = {group: next(times) for group in sorted(self._communicator_times)}
        self._late_free_times = deque(next(times) for _ in self._late_free_times)
        self._late_frees = sorted((next(times), size, stream) for _, size, stream in sorted(self._late_frees))
        self._collective_spans = deque((next(times), next(times)) for _ in self._collective_spans)
        if self._replay is not None:
            self._replay.allocator.move_late_frees(times)
        self.processor_time = next(times)
        self.stream_times = {stream: next(times) for stream in self.stream_times}
        self.spent_seconds = dict(zip(self.spent_seconds, state.spent_seconds.tolist(), strict=True))

    # Computation, copies and collectives, and the time they take

    def simulate_chunk(self, chunk: Chunk, kind: str) -> None:
        """A piece of the model's own computation."""
        self.note_peak(chunk.peak_bytes, chunk.lasting_bytes_at_peak, chunk.gradient_bytes_at_peak)
        if self._replay is not None:
            self._replay.play(chunk, self.place, self.processor_time)
        self.add_activations(chunk.net_bytes, chunk.lasting_net_bytes)
        if chunk.num_kernels:
            self._run_kernels(kind, chunk.seconds, chunk.num_kernels)
        if chunk.communication_s:
            self._simulate_layer_collective(chunk.communication_s)
            self.spent_seconds["transfer"] += chunk.transfer_s

    def _simulate_layer_collective(self, seconds: float) -> None:
        """Ranks that share a layer exchange something; what is computed next waits for it."""
        start = max(self.stream_times[COMPUTE_STREAM], self.processor_time)
        end = start + seconds
        self.spent_seconds["launch"] += start - self.stream_times[COMPUTE_STREAM]
        self.spent_seconds["exposed"] += seconds
        self.spent_seconds["communication"] += seconds
        self.stream_times[COMPUTE_STREAM] = end
        if self._speed.is_cpu:
            self.processor_time = end
        if self._timeline is not None:
            self._timeline.append(TimelineSpan(COMPUTE_STREAM, f"exchange {self.module}", "exchange", start, end))

    def copy_within_device(self, name: str, size: float) -> None:
        speed = self._speed
        s_per_byte = speed.reduce_input_s_per_byte if name == REDUCE_INPUT else speed.copy_s_per_byte
        self._run_kernels(name, size * s_per_byte + speed.min_kernel_s, 1, records_span=False)

    def simulate_optimizer_step(self, seconds: float, num_kernels: int, transfer_s: float = 0.0) -> None:
        """The optimizer's step, some seconds of which are copies from and to the machine's memory."""
        self._run_kernels("optimizer", seconds, num_kernels)
        self.spent_seconds["carried"] += transfer_s

    def _run_kernels(self, kind: str, seconds: float, num_kernels: int, *, records_span: bool = True) -> None:
        """Kernels on the computing stream, which the processor launches one by one."""
        issue_time, launch_s = self.processor_time, self._speed.launch_s
        self.processor_time += num_kernels * launch_s
        previous_end = self.stream_times[COMPUTE_STREAM]
        start = max(previous_end, issue_time + launch_s)
        undisturbed_seconds = seconds
        if self._collective_spans:
            seconds = self._compute_slowed_seconds(start, seconds)
        # The last kernel starts when it has been launched; those before it ran meanwhile.
        end = max(start + seconds, self.processor_time + (seconds / num_kernels if num_kernels else 0.0))
        if self._speed.is_cpu:
            end = self.processor_time = max(previous_end, issue_time) + num_kernels * launch_s + seconds
        self.stream_times[COMPUTE_STREAM] = end
        key = "optimizer" if kind == "optimizer" else "compute"
        self.spent_seconds[key] += undisturbed_seconds
        self.spent_seconds["exposed"] += seconds - undisturbed_seconds
        self.spent_seconds["launch"] += end - previous_end - seconds
        if records_span and self._timeline is not None:
            self._timeline.append(TimelineSpan(COMPUTE_STREAM, f"{kind} {self.module}", kind, start, end))

    def _compute_slowed_seconds(self, start: float, seconds: float) -> float:
        """Seconds of computation that starts at some time, longer by what sending beside it takes away."""
        overlap_loss, spans = self._speed.overlap_loss, self._collective_spans
        if not overlap_loss or seconds == 0.0:
            return seconds
        while spans and spans[0][1] <= start:
            spans.popleft()
        if not spans:
            return seconds
        overlapped_seconds = 0.0
        end = start + seconds
        covered_until = start
        for overlap_start, overlap_end in spans:
            if overlap_start < covered_until:
                overlap_start = covered_until
            if overlap_end > end:
                overlap_end = end
            if overlap_end > overlap_start:
                overlapped_seconds += overlap_end - overlap_start
                covered_until = overlap_end
        return seconds + overlapped_seconds * overlap_loss

    def run_collective(
        self, name: str, kind: str, size: float, group: str, stream: str, *, after: str | None = None
    ) -> None:
        self.processor_time += self._speed.launch_s
        seconds = self._speed.collective_seconds(kind, size, group)
        # Collectives of one communicator run one after the other, on whatever streams.
        start = max(self.stream_times[stream], self._communicator_times.get(group, 0.0), self.processor_time)
        if after is not None:
            start = max(start, self.stream_times[after])
        end = start + seconds
        self.stream_times[stream] = self._communicator_times[group] = end
        if self._speed.records_nccl_stream:
            self.stream_times[NCCL_STREAM] = end
        self._event_times[name] = end
        self.spent_seconds["communication"] += seconds
        if seconds:
            self._delay_running_kernels(start, end)
            if self._speed.overlap_loss:
                self._add_collective_span(start, end)
            if self._timeline is not None:
                self._timeline.append(TimelineSpan(stream, f"{kind} {self.module}", kind, start, end))

    def _add_collective_span(self, start: float, end: float) -> None:
        """What follows at once is one with the span before it."""
        if self._collective_spans and self._collective_spans[-1][1] == start:
            start = self._collective_spans.pop()[0]
        self._collective_spans.append((start, end))

    def copy_host_device(self, name: str, size: float, stream: str, *, after: str | None = None) -> None:
        """As `PlanDevice` says. Copy engines of their own do it, so computation loses nothing."""
        self.processor_time += self._speed.launch_s
        start = max(self.stream_times[stream], self.processor_time, self.stream_times[after] if after else 0.0)
        end = self.stream_times[stream] = self._event_times[name] = start + size * self._speed.transfer_s_per_byte
        self.spent_seconds["transfer"] += end - start
        self.spent_seconds["communication"] += end - start
        if self._timeline is not None and end > start:
            self._timeline.append(TimelineSpan(stream, f"transfer {self.module}", "transfer", start, end))

    def simulate_host_optimizer_step(self, seconds: float) -> None:
        """The optimizer's step, by the processors, when the device has done all that it was given."""
        self.synchronize()
        start, self.processor_time = self.processor_time, self.processor_time + seconds
        self.stream_times[COMPUTE_STREAM] = self.processor_time
        self.spent_seconds["optimizer"] += seconds
        self.updated_on_host = True
        if self._timeline is not None:
            self._timeline.append(
                TimelineSpan(COMPUTE_STREAM, "optimizer on the host", "optimizer", start, self.processor_time)
            )

    def _delay_running_kernels(self, start: float, end: float) -> None:
        """Computation that was launched before takes longer while something is sent beside it."""
        overlapped_seconds = min(end, self.stream_times[COMPUTE_STREAM]) - start
        if overlapped_seconds > 0:
            self.stream_times[COMPUTE_STREAM] += overlapped_seconds * self._speed.overlap_loss
            self.spent_seconds["exposed"] += overlapped_seconds * self._speed.overlap_loss

    def wait_for_event(self, name: str) -> None:
        event_time = self._event_times.get(name, 0.0)
        previous_end = self.stream_times[COMPUTE_STREAM]
        if event_time > previous_end:
            launched_until = max(previous_end, min(self.processor_time, event_time))
            self.spent_seconds["launch"] += launched_until - previous_end  # nothing would have been launched yet anyway
            self.spent_seconds["exposed"] += event_time - launched_until
            if self._timeline is not None and event_time > launched_until:
                span = TimelineSpan(COMPUTE_STREAM, f"wait for {name}", "wait", launched_until, event_time)
                self._timeline.append(span)
            self.stream_times[COMPUTE_STREAM] = event_time

    def record_event(self, name: str) -> None:
        self._event_times[name] = self.stream_times[COMPUTE_STREAM]

    def follow_stream(self, stream: str, name: str) -> None:
        self.stream_times[stream] = max(self.stream_times[stream], self._event_times.get(name, 0.0))

    def note_late_free(self, *, after: str | None = None) -> None:
        self._late_free_times.append(self.stream_times[after or COMPUTE_STREAM])

    def limit_all_gathers(self, max_unfinished: int) -> None:
        if len(self._late_free_times) >= max_unfinished:
            self.processor_time = max(self.processor_time, self._late_free_times.popleft())

    def run_hooks(self, count: float = 1.0) -> None:
        self.processor_time += count * self._speed.unit_hooks_s

    def synchronize(self) -> None:
        """The processor waits for the device, as at the end of a step that is timed."""
        self.processor_time = max(self.processor_time, self.stream_times[COMPUTE_STREAM])


def round_parts(parts: Mapping[str, float]) -> dict[str, int]:
    """Bytes per part as whole numbers."""
    return {name: round(size) for name, size in parts.items()}
