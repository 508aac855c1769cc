"""One rank on which a step is played: its memory, its streams and the processor that feeds them.

Memory changes when the processor says so, in its order, as in PyTorch's caching allocator: what another stream still
uses when it is freed stays out of use for a while (*active*, not *allocated*). Time passes on every stream by itself.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.simulate.prediction import PARTS, Span
from bench.simulate.reel import Piece
from bench.strategies.plan import GATHER, GATHERED, GRADIENTS, OPTIMIZER, REDUCE, REDUCED, REPLICATE

COMPUTE = "compute"
STREAMS = (COMPUTE, GATHER, REDUCE, REPLICATE)

OWN_SEGMENT_BYTES = 10 * 2**20
"""From this size on the caching allocator gives a block a segment of its own (``kMinLargeAlloc``)."""

ACTIVATIONS, TEMPORARIES = "activations", "temporaries"

GRADIENT_NAMES = ("gradients ", "gradient shard ")
"""Beginnings of the names under which plans keep gradients from step to step; their buckets have others."""

Seconds = Callable[[str, float, str], float]
"""Time of a collective: kind, bytes, group."""


@dataclass(frozen=True)
class Pace:
    """How fast the rank is. All zero where nobody knows: memory is the same."""

    collective: Seconds = lambda kind, size, group: 0.0
    copy_s_per_byte: float = 0.0
    launch_s: float = 0.0
    """Of one kernel, on the processor."""
    launches_itself: bool = False
    """The processor that launches is the device that computes: it does one after the other."""
    hooks_s: float = 0.0
    """Of a unit's hooks, on the processor."""
    kernel_s: float = 0.0
    """Shortest time of a kernel on the device."""
    overlap_loss: float = 0.0
    """Share of its speed that computation loses while something is sent."""
    transfer_s_per_byte: float = 0.0
    """Between the device and its machine's memory, in one direction."""
    retry_s_per_byte: float = 0.0
    """Above 0: the device stands still for so long whenever a large buffer is allocated beside the computation."""


@dataclass
class Peak:
    """The highest memory so far, and what it consists of."""

    size: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    phase: str = "forward"
    module: str = ""


class Machine:
    """Implements `bench.strategies.plan.Device`, and plays the model's own pieces in between."""

    def __init__(self, pace: Pace, *, timeline: bool = False) -> None:
        self._pace = pace
        self._held: dict[str, tuple[float, str]] = {}
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._allocated = 0.0
        self._until: list[tuple[float, float]] = []
        self._inactive_soon = 0.0
        self.peak = Peak()
        self.phase_peaks: dict[str, float] = {}
        self.initial = 0.0
        """Allocated before the first step, which is not the one that is played."""
        self.active = 0.0
        self.phase, self.module = "forward", ""
        self.processor = 0.0
        self.streams = dict.fromkeys(STREAMS, 0.0)
        self._done: dict[str, float] = {}
        self._noted: deque[float] = deque()
        self.spent = dict.fromkeys(
            ("compute", "optimizer", "exposed", "launch", "communication", "transfer", "carried"), 0.0
        )
        self._timeline: list[Span] | None = [] if timeline else None
        self._sending: deque[tuple[float, float]] = deque()
        self._communicators: dict[str, float] = {}
        self.updated_on_host = False

    @property
    def timeline(self) -> tuple[Span, ...]:
        """What happened, if it was to be remembered."""
        return tuple(self._timeline or ())

    # Memory

    def hold(self, name: str, size: float, part: str) -> None:
        """As `Device` says. What is held under the name already is freed first."""
        if name in self._held:
            self.release(name)
        self._held[name] = (size, part)
        self._parts[part] += size
        self._allocated += size
        self._look(0.0, 0.0)
        if self._pace.retry_s_per_byte and part in (GATHERED, REDUCED) and size >= OWN_SEGMENT_BYTES:
            self._retry(size)

    def _retry(self, size: float) -> None:
        """The allocator waits for all streams, gives back what it caches and asks the device anew."""
        before = self.streams[COMPUTE]
        now = max(self.processor, *self.streams.values()) + size * self._pace.retry_s_per_byte
        self.processor = now
        for stream in self.streams:
            self.streams[stream] = now
        self.spent["launch"] += now - before
        if self._timeline is not None:
            self._timeline.append(Span(COMPUTE, f"allocator {self.module}", "wait", before, now))

    def release(self, name: str, *, after: str | None = None) -> None:
        """As `Device` says."""
        found = self._held.pop(name, None)
        if found is None:
            return
        size, part = found
        self._parts[part] -= size
        self._allocated -= size
        if after is not None and (ready := self.streams[after]) > self.processor:
            heapq.heappush(self._until, (ready, size))
            self._inactive_soon += size

    def _look(self, above: float, lasting: float, gradients: float = 0.0) -> None:
        """Note a new peak, `above` what is allocated now; `lasting` of it in storages that stay."""
        level = self._allocated + above
        if level > self.phase_peaks.get(self.phase, 0.0):
            self.phase_peaks[self.phase] = level
        if level > self.peak.size:
            parts = dict(self._parts)
            parts[ACTIVATIONS] += lasting
            parts[GRADIENTS] += gradients
            parts[TEMPORARIES] += above - lasting - gradients
            self.peak = Peak(level, parts, self.phase, self.module)
        while self._until and self._until[0][0] <= self.processor:
            self._inactive_soon -= heapq.heappop(self._until)[1]
        self.active = max(self.active, level + self._inactive_soon)

    @property
    def elapsed(self) -> float:
        """Seconds since the step began, until the computing stream is done."""
        return self.streams[COMPUTE]

    # Time

    def note_initial(self) -> None:
        """What is held now is there before the first step, too, but for optimizer state and gradients that are kept."""
        self.initial = sum(
            size
            for name, (size, part) in self._held.items()
            if part != OPTIMIZER and not name.startswith(GRADIENT_NAMES)
        )

    def grow(self, name: str, size: float, part: str) -> None:
        """Hold more under a name, without a look at the peak: whoever calls has taken it into account."""
        self._held[name] = (self._held.get(name, (0.0, part))[0] + size, part)
        self._parts[part] += size
        self._allocated += size

    def play(self, piece: Piece, kind: str) -> None:
        """A piece of the model's own computation."""
        self._look(piece.peak, piece.lasting_at_peak, piece.gradients_at_peak)
        self._allocated += piece.net
        self._parts[ACTIVATIONS] += piece.lasting_net
        self._parts[TEMPORARIES] += piece.net - piece.lasting_net
        if piece.kernels:
            self._run(kind, piece.seconds, piece.kernels)
        if piece.communication:
            self._exchange(piece.communication)

    def _exchange(self, seconds: float) -> None:
        """Ranks that share a layer exchange something; what is computed next waits for it."""
        start = max(self.streams[COMPUTE], self.processor)
        end = start + seconds
        self.spent["launch"] += start - self.streams[COMPUTE]
        self.spent["exposed"] += seconds
        self.spent["communication"] += seconds
        self.streams[COMPUTE] = end
        if self._pace.launches_itself:
            self.processor = end
        if self._timeline is not None:
            self._timeline.append(Span(COMPUTE, f"exchange {self.module}", "exchange", start, end))

    def copy(self, name: str, size: float) -> None:
        """As `Device` says."""
        self._run(name, size * self._pace.copy_s_per_byte + self._pace.kernel_s, 1, span=False)

    def update(self, seconds: float, kernels: int, carried_s: float = 0.0) -> None:
        """The optimizer's step, some seconds of which are copies from and to the machine's memory."""
        self._run("optimizer", seconds, kernels)
        self.spent["carried"] += carried_s

    def _run(self, kind: str, seconds: float, kernels: int, *, span: bool = True) -> None:
        """Kernels on the computing stream, which the processor launches one by one."""
        issued = self.processor
        self.processor += kernels * self._pace.launch_s
        before = self.streams[COMPUTE]
        start = max(before, issued + self._pace.launch_s)
        alone = seconds
        seconds = self._slowed(start, seconds)
        # The last kernel starts when it has been launched; those before it ran meanwhile.
        end = max(start + seconds, self.processor + (seconds / kernels if kernels else 0.0))
        if self._pace.launches_itself:
            end = self.processor = max(before, issued) + kernels * self._pace.launch_s + seconds
        self.streams[COMPUTE] = end
        key = "optimizer" if kind == "optimizer" else "compute"
        self.spent[key] += alone
        self.spent["exposed"] += seconds - alone
        self.spent["launch"] += end - before - seconds
        if span and self._timeline is not None:
            self._timeline.append(Span(COMPUTE, f"{kind} {self.module}", kind, start, end))

    def _slowed(self, start: float, seconds: float) -> float:
        """Seconds of computation that starts at some time, longer by what sending beside it takes away."""
        loss = self._pace.overlap_loss
        if not loss or seconds == 0.0:
            return seconds
        while self._sending and self._sending[0][1] <= start:
            self._sending.popleft()
        beside = 0.0
        end = start + seconds
        covered = start
        for first, last in self._sending:
            first, last = max(first, covered), min(last, end)
            if last > first:
                beside += last - first
                covered = last
        return seconds + beside * loss

    def send(self, name: str, kind: str, size: float, group: str, stream: str, *, after: str | None = None) -> None:
        """As `Device` says."""
        self.processor += self._pace.launch_s
        seconds = self._pace.collective(kind, size, group)
        # Collectives of one communicator run one after the other, on whatever streams.
        start = max(self.streams[stream], self._communicators.get(group, 0.0), self.processor)
        if after is not None:
            start = max(start, self.streams[after])
        end = start + seconds
        self.streams[stream] = self._communicators[group] = end
        self._done[name] = end
        self.spent["communication"] += seconds
        if seconds:
            self._delay_what_runs(start, end)
            self._sending.append((start, end))
            if self._timeline is not None:
                self._timeline.append(Span(stream, f"{kind} {self.module}", kind, start, end))

    def transfer(self, name: str, size: float, stream: str, *, after: str | None = None) -> None:
        """As `Device` says. Copy engines of their own do it, so computation loses nothing."""
        self.processor += self._pace.launch_s
        start = max(self.streams[stream], self.processor, self.streams[after] if after else 0.0)
        end = self.streams[stream] = self._done[name] = start + size * self._pace.transfer_s_per_byte
        self.spent["transfer"] += end - start
        self.spent["communication"] += end - start
        if self._timeline is not None and end > start:
            self._timeline.append(Span(stream, f"transfer {self.module}", "transfer", start, end))

    def update_on_host(self, seconds: float) -> None:
        """The optimizer's step, by the processors, when the device has done all that it was given."""
        self.synchronize()
        before, self.processor = self.processor, self.processor + seconds
        self.streams[COMPUTE] = self.processor
        self.spent["optimizer"] += seconds
        self.updated_on_host = True
        if self._timeline is not None:
            self._timeline.append(Span(COMPUTE, "optimizer on the host", "optimizer", before, self.processor))

    def _delay_what_runs(self, start: float, end: float) -> None:
        """Computation that was launched before takes longer while something is sent beside it."""
        beside = min(end, self.streams[COMPUTE]) - start
        if beside > 0:
            self.streams[COMPUTE] += beside * self._pace.overlap_loss
            self.spent["exposed"] += beside * self._pace.overlap_loss

    def wait(self, name: str) -> None:
        """As `Device` says."""
        done = self._done.get(name, 0.0)
        before = self.streams[COMPUTE]
        if done > before:
            reached = max(before, min(self.processor, done))
            self.spent["launch"] += reached - before  # nothing would have been launched yet anyway
            self.spent["exposed"] += done - reached
            if self._timeline is not None and done > reached:
                span = Span(COMPUTE, f"wait for {name}", "wait", reached, done)
                self._timeline.append(span)
            self.streams[COMPUTE] = done

    def mark(self, name: str) -> None:
        """As `Device` says."""
        self._done[name] = self.streams[COMPUTE]

    def follow(self, stream: str, name: str) -> None:
        """As `Device` says."""
        self.streams[stream] = max(self.streams[stream], self._done.get(name, 0.0))

    def note_release(self, *, after: str | None = None) -> None:
        """As `Device` says."""
        self._noted.append(self.streams[after or COMPUTE])

    def throttle(self, most: int) -> None:
        """As `Device` says."""
        if len(self._noted) >= most:
            self.processor = max(self.processor, self._noted.popleft())

    def hooks(self, count: float = 1.0) -> None:
        """As `Device` says."""
        self.processor += count * self._pace.hooks_s

    def synchronize(self) -> None:
        """The processor waits for the device, as at the end of a step that is timed."""
        self.processor = max(self.processor, self.streams[COMPUTE])


def rounded(parts: Mapping[str, float]) -> dict[str, int]:
    """Bytes per part as whole numbers."""
    return {name: round(size) for name, size in parts.items()}
