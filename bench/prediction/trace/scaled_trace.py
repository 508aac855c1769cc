"""A trace made ready to be simulated: at any batch size, at the model's true depth, in pieces between gradients.

What a trace counts grows linearly with the batch, so two traces give all others. A batch of one is traced itself:
where a dimension is 1, operators leave out copies that they make otherwise. So is every batch of compiled blocks: what
the compiler keeps for backward and what it fuses depends on the size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.models.checkpointing import BlockPositions
from bench.prediction.trace.kernels import FloatArray, IntArray, KernelArrays
from bench.prediction.trace.trace import (
    LOSS_PLACE,
    TO_DEVICE,
    TO_HOST,
    BlockPlace,
    GradientEvent,
    LayerPassEvent,
    Trace,
    TraceSegment,
)

TRACED_BATCH_SIZES = (2, 3)
"""Batch sizes that are traced, from which all but 1 follow where blocks are not compiled."""


@dataclass(frozen=True)
class ScaledSegment:
    """One segment of a trace at several batch sizes: what changes with the batch has a base and a slope."""

    phase: str
    micro_batch: int
    place: BlockPlace
    chunk_ends: tuple[int, ...]
    """Where the pieces end, as indices into the changes: at each event, and at the end."""
    kernel_ends: tuple[int, ...]
    events: tuple[GradientEvent | LayerPassEvent, ...]
    """What ends each piece but the last."""
    changes: tuple[FloatArray, FloatArray]
    """Bytes allocated (negative: released), base and slope."""
    lasting_changes: tuple[FloatArray, FloatArray]
    """The same of storages that outlive the segment they are made in, or were made in an earlier one."""
    joint_free_places: IntArray
    """Per change the block list and the block in it that stands for others which all release such a storage here
    together, each in its turn; -1 and -1 for none. Shape (changes, 2)."""
    kernels: tuple[KernelArrays, KernelArrays]
    """At the first and the second of the traced batch sizes."""
    collectives: tuple[ScaledCollective, ...] = ()
    storages: tuple[int, ...] = ()
    """Per change the number of its storage."""
    storage_origins: StorageOrigins | None = None
    """Of the whole trace."""


@dataclass(frozen=True)
class ScaledCollective:
    """Ranks that share a layer exchange something, and computation waits for it."""

    kernels_before: int
    """Kernels of the segment started by then."""
    kind: str
    base_bytes: float
    slope_bytes: float
    group: str
    waited_kernels: int
    """Kernels of the segment started when it is waited for."""

    def compute_bytes(self, batch_weight: float) -> float:
        """Bytes of the whole at a batch size (see `ScaledTrace.compute_batch_weight`)."""
        return self.base_bytes + batch_weight * self.slope_bytes


@dataclass(frozen=True)
class Chunk:
    """What happens between two gradients of a segment."""

    peak_bytes: float
    """Highest memory after any change within the piece, above that at its beginning, in bytes. Negative where a piece
    begins with a release, as of the gradient that ended the piece before it, and never comes up to that again."""
    lasting_bytes_at_peak: float
    """Of `peak_bytes`, storages that outlive their segment."""
    net_bytes: float
    lasting_net_bytes: float
    seconds: float
    """Of the device, nothing else going on."""
    num_kernels: int
    completed_gradient: str | None
    """Parameter whose gradient is complete at the end."""
    gradient_bytes_at_peak: float = 0.0
    """Of `peak_bytes`, gradients that were completed before it within the piece."""
    communication_s: float = 0.0
    """Seconds in which nothing is computed, since ranks that share a layer exchange something; not in `seconds`."""
    layer_pass: LayerPassEvent | None = None
    """What begins or ends at the end."""
    transfer_s: float = 0.0
    """Of `communication_s`, copies between device and host."""
    pieces: tuple[MemoryPiece, ...] = field(default=(), compare=False)
    """The changes of memory that it sums up."""
    kept_sizes: tuple[float, ...] = ()
    """Bytes of the gradients that stay after each of the pieces but the last, where there are several."""


@dataclass(frozen=True)
class StorageOrigin:
    """Where a storage of a trace is made."""

    phase: str
    micro_batch: int
    place: BlockPlace
    segment: int
    """Index of the segment, -1 within blocks, where the blocks that a block stands for have one each."""
    order: int
    """Of the segment's storages: blocks that are alike make theirs in the same order."""


class StorageOrigins:
    """The origin of every storage of a trace, found when first asked for."""

    def __init__(self, segments: Sequence[TraceSegment]) -> None:
        self._segments = [
            (
                segment.phase,
                segment.micro_batch,
                segment.place,
                [number for size, number in segment.changes if size > 0],
            )
            for segment in segments
        ]

    @functools.cached_property
    def by_number(self) -> dict[int, StorageOrigin]:
        return {
            number: StorageOrigin(phase, micro_batch, place, -1 if _is_block(place) else index, order)
            for index, (phase, micro_batch, place, numbers) in enumerate(self._segments)
            for order, number in enumerate(numbers)
        }


@dataclass(frozen=True)
class MemoryEvent:
    """A storage is made or freed."""

    size: int
    """Bytes; 0 where it is freed."""
    number: int
    """Of the storage in the trace."""
    origin: StorageOrigin | None
    """None: it is freed within the segment that it is made in."""
    frees_all_alike: bool = False
    """With it go those of all blocks that its block stands for."""


@dataclass(frozen=True, eq=False)
class MemoryPiece:
    """The changes of memory between two events of a segment, at a batch size."""

    segment: ScaledSegment
    start: int
    end: int
    batch_weight: float

    @functools.cached_property
    def events(self) -> tuple[MemoryEvent, ...]:
        """In order, without what is neither there at the peak nor after the piece."""
        segment, origins = self.segment, self.segment.storage_origins
        if origins is None or self.start == self.end:
            return ()
        span = slice(self.start, self.end)
        sizes = np.rint(segment.changes[0][span] + self.batch_weight * segment.changes[1][span]).astype(np.int64)
        peak_index = int(np.argmax(np.cumsum(sizes)))
        is_lasting = (segment.lasting_changes[0][span] != 0) | (segment.lasting_changes[1][span] != 0)
        numbers = segment.storages[span]
        last_indices = {number: index for index, number in enumerate(numbers)}
        first_indices = {number: index for index, number in reversed(list(enumerate(numbers)))}
        events = []
        for index, number in enumerate(numbers):
            first, last = first_indices[number], last_indices[number]
            if first < last and not (first <= peak_index < last):
                continue
            events.append(
                MemoryEvent(
                    max(0, int(sizes[index])),
                    number,
                    origins.by_number[number] if is_lasting[index] else None,
                    segment.joint_free_places[self.start + index][0] >= 0,
                )
            )
        return tuple(events)


def _is_block(place: BlockPlace) -> bool:
    return place is not None and place != LOSS_PLACE


@dataclass(frozen=True, eq=False)
class SegmentAtBatch:
    """A segment at one batch size."""

    phase: str
    micro_batch: int
    place: BlockPlace
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ScaledTrace:
    """A trace that can be simulated at any batch size."""

    segments: tuple[ScaledSegment, ...]
    inputs_bytes: tuple[float, float]
    """Bytes of the micro-batches, base and slope."""
    traced_batch_sizes: tuple[int, int]
    outputs_bytes: tuple[float, float]
    """Bytes of everything the model returns, base and slope."""
    logits_bytes: tuple[float, float]
    """The same of its logits alone."""

    def compute_batch_weight(self, batch_size: int) -> float:
        """How far the batch size is beyond the first traced one, in steps to the second."""
        first, second = self.traced_batch_sizes
        return (batch_size - first) / (second - first) if second > first else 0.0


def build_scaled_trace(first: Trace, second: Trace, batch_sizes: tuple[int, int], period: int = 1) -> ScaledTrace:
    """Prepare what was traced at two batch sizes (or one, twice), of blocks that repeat after `period` of them.

    Raises
    ------
    ValueError
        If the model does not do the same at both.
    """
    joint_frees = _find_joint_frees(first.segments, period)
    origins = StorageOrigins(first.segments)
    segments = tuple(
        _scale_segment(
            a,
            b,
            np.array(
                [joint_frees.get((index, position), (-1, -1)) for position in range(len(a.changes))], dtype=np.int64
            ).reshape(-1, 2),
            origins,
        )
        for index, (a, b) in enumerate(_pair_segments(first, second))
    )
    return ScaledTrace(
        tuple(
            segment for segment in segments if len(segment.changes[0]) or len(segment.kernels[0]) or segment.collectives
        ),
        (first.inputs_bytes, second.inputs_bytes - first.inputs_bytes),
        batch_sizes,
        (first.outputs_bytes, second.outputs_bytes - first.outputs_bytes),
        (first.logits_bytes, second.logits_bytes - first.logits_bytes),
    )


def list_traced_batch_sizes(batch_size: int, *, is_compiled: bool) -> tuple[int, int]:
    """Which batch sizes to trace for a batch of some size."""
    return (batch_size, batch_size) if is_compiled or batch_size == 1 else TRACED_BATCH_SIZES


def _pair_segments(first: Trace, second: Trace) -> Iterator[tuple[TraceSegment, TraceSegment]]:
    if len(first.segments) != len(second.segments):
        raise ValueError("the model runs differently at different batch sizes")
    for a, b in zip(first.segments, second.segments, strict=True):
        is_alike = (
            len(a.changes) == len(b.changes)
            and [kernel[0] for kernel in a.kernels] == [kernel[0] for kernel in b.kernels]
            and a.events == b.events
            and [(event.kernel, event.kind) for event in a.collectives]
            == [(event.kernel, event.kind) for event in b.collectives]
            and [event.waited_kernel for event in a.collectives] == [event.waited_kernel for event in b.collectives]
        )
        if not is_alike:
            raise ValueError(f"the model runs differently at different batch sizes, in {a.phase} of {a.place}")
        yield a, b


def _scale_segment(
    a: TraceSegment, b: TraceSegment, joint_free_places: IntArray, origins: StorageOrigins
) -> ScaledSegment:
    is_temporary = _find_temporary_changes(a)
    sizes = np.array([size for size, _ in a.changes], dtype=float)
    slopes = np.array([size for size, _ in b.changes], dtype=float) - sizes
    is_lasting = ~is_temporary
    return ScaledSegment(
        phase=a.phase,
        micro_batch=a.micro_batch,
        place=a.place,
        chunk_ends=(*(event.position for event in a.events), len(a.changes)),
        kernel_ends=(*(event.kernel for event in a.events), len(a.kernels)),
        events=tuple(a.events),
        changes=(sizes, slopes),
        lasting_changes=(sizes * is_lasting, slopes * is_lasting),
        joint_free_places=joint_free_places,
        kernels=(build_kernel_arrays(a), build_kernel_arrays(b)),
        collectives=tuple(
            ScaledCollective(
                first_event.kernel,
                first_event.kind,
                first_event.size,
                second_event.size - first_event.size,
                first_event.group,
                first_event.kernel if first_event.waited_kernel is None else first_event.waited_kernel,
            )
            for first_event, second_event in zip(a.collectives, b.collectives, strict=True)
        ),
        storages=tuple(number for _, number in a.changes),
        storage_origins=origins,
    )


def _find_joint_frees(segments: Sequence[TraceSegment], period: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Releases, by segment and change, of what every inner block made and all lose at the same time, with its place.

    Autocast's copies of the weights are such: they last until the forward pass is over. What is released in the pass
    of the block that comes next is not: of that each inner block releases its predecessor's.
    """
    allocations: dict[int, tuple[int, int]] = {}
    frees: dict[int, tuple[int, int]] = {}
    storage_by_order: dict[tuple[int, int], int] = {}
    for index, segment in enumerate(segments):
        order = 0
        for position, (size, number) in enumerate(segment.changes):
            if size > 0:
                allocations[number] = index, order
                storage_by_order[index, order] = number
                order += 1
            else:
                frees[number] = index, position
    index_by_place = {
        (segment.phase, segment.micro_batch, segment.place): index for index, segment in enumerate(segments)
    }
    joint_frees: dict[tuple[int, int], tuple[int, int]] = {}
    repeated_positions = range(1 + period, 1 + 2 * period)
    for number, (index, order) in allocations.items():
        segment = segments[index]
        if (
            segment.place is None
            or segment.place == LOSS_PLACE
            or segment.place[1] not in repeated_positions
            or number not in frees
        ):
            continue
        neighbour_index = index_by_place.get(
            (segment.phase, segment.micro_batch, (segment.place[0], segment.place[1] - period))
        )
        twin_storage = storage_by_order.get((neighbour_index, order)) if neighbour_index is not None else None
        free_position = frees[number]
        if (
            twin_storage is not None
            and free_position[0] != index
            and frees.get(twin_storage, (None,))[0] == free_position[0]
        ):
            joint_frees[free_position] = segment.place
    return joint_frees


def _find_temporary_changes(segment: TraceSegment) -> np.ndarray:
    """Which changes belong to storages that are made and released within the segment."""
    change_counts: dict[int, int] = {}
    for _, number in segment.changes:
        change_counts[number] = change_counts.get(number, 0) + 1
    return np.array([change_counts[number] == 2 for _, number in segment.changes], dtype=bool)


def build_kernel_arrays(segment: TraceSegment) -> KernelArrays:
    """A segment's kernels as arrays."""
    records = segment.kernels
    dims = np.zeros((len(records), 5))
    for index, record in enumerate(records):
        dims[index, : len(record[3])] = record[3]
    return KernelArrays(
        operators=tuple(record[0] for record in records),
        kinds=np.array([record[1] for record in records], dtype=np.int64),
        formats=np.array([record[2] for record in records], dtype=np.int64),
        dims=dims,
        flops=np.array([record[4] for record in records], dtype=float),
        bytes_moved=np.array([record[5] for record in records], dtype=float),
    )


def scale_kernels(segment: ScaledSegment, batch_weight: float) -> KernelArrays:
    """A segment's kernels at a batch size (see `ScaledTrace.compute_batch_weight`)."""
    first, second = segment.kernels
    if batch_weight == 0.0:
        return first
    return KernelArrays(
        first.operators,
        first.kinds,
        first.formats,
        first.dims + batch_weight * (second.dims - first.dims),
        first.flops + batch_weight * (second.flops - first.flops),
        first.bytes_moved + batch_weight * (second.bytes_moved - first.bytes_moved),
    )


def build_chunks(
    segment: ScaledSegment,
    batch_weight: float,
    kernel_seconds: FloatArray | None,
    block_positions: Sequence[BlockPositions] = (),
    time_collective: Callable[[str, float, str], float] = lambda kind, size, group: 0.0,
) -> tuple[Chunk, ...]:
    """The chunks of a segment at a batch size.

    Parameters
    ----------
    batch_weight: float
        As `ScaledTrace.compute_batch_weight` says for the batch size.
    block_positions: sequence of BlockPositions
        Per list; none if the whole model was traced.
    kernel_seconds: array or None
        Of each kernel; None where speeds are unknown.
    time_collective: callable
        Seconds of a collective among ranks that share a layer: of its kind, its bytes and its group.
    """
    repetitions = np.ones(len(segment.joint_free_places))
    for index, (list_index, position) in enumerate(segment.joint_free_places if block_positions else ()):
        if list_index >= 0:
            repetitions[index] = max(1, block_positions[list_index].count_alike(position))
    changes = np.rint(segment.changes[0] + batch_weight * segment.changes[1]) * repetitions
    lasting_changes = np.rint(segment.lasting_changes[0] + batch_weight * segment.lasting_changes[1]) * repetitions
    exposed_seconds = _list_exposed_seconds(segment, batch_weight, kernel_seconds, time_collective)
    chunks = []
    start = kernel_start = 0
    for chunk_index, (end, kernel_end) in enumerate(zip(segment.chunk_ends, segment.kernel_ends, strict=True)):
        event = segment.events[chunk_index] if chunk_index < len(segment.events) else None
        levels, lasting_levels = np.cumsum(changes[start:end]), np.cumsum(lasting_changes[start:end])
        peak_index = int(np.argmax(levels)) if end > start else 0
        is_last = chunk_index == len(segment.chunk_ends) - 1
        collective_seconds = [
            (kind, seconds)
            for kind, kernels_before, seconds in exposed_seconds
            if kernel_start <= kernels_before < kernel_end or (is_last and kernels_before == kernel_end)
        ]
        chunks.append(
            Chunk(
                peak_bytes=float(levels[peak_index]) if end > start else 0.0,
                lasting_bytes_at_peak=float(lasting_levels[peak_index]) if end > start else 0.0,
                net_bytes=float(levels[-1]) if end > start else 0.0,
                lasting_net_bytes=float(lasting_levels[-1]) if end > start else 0.0,
                seconds=0.0 if kernel_seconds is None else float(kernel_seconds[kernel_start:kernel_end].sum()),
                num_kernels=kernel_end - kernel_start,
                completed_gradient=event.parameter if isinstance(event, GradientEvent) else None,
                layer_pass=event if isinstance(event, LayerPassEvent) else None,
                communication_s=sum(seconds for _, seconds in collective_seconds),
                transfer_s=sum(seconds for kind, seconds in collective_seconds if kind in (TO_HOST, TO_DEVICE)),
                pieces=(MemoryPiece(segment, start, end, batch_weight),),
            )
        )
        start, kernel_start = end, kernel_end
    return tuple(chunks)


def _list_exposed_seconds(
    segment: ScaledSegment,
    batch_weight: float,
    kernel_seconds: FloatArray | None,
    time_collective: Callable[[str, float, str], float],
) -> list[tuple[str, int, float]]:
    """Of each collective: its kind, the kernels before it is waited for, and the seconds for which it is.

    Those that go on beside kernels follow each other.
    """
    ends = np.zeros(1) if kernel_seconds is None else np.concatenate([np.zeros(1), np.cumsum(kernel_seconds)])
    exposed_seconds = []
    waited_s = busy_until = 0.0
    for collective in segment.collectives:
        seconds = time_collective(collective.kind, collective.compute_bytes(batch_weight), collective.group)
        before, waited = collective.kernels_before, collective.waited_kernels
        if before < waited and kernel_seconds is not None:
            busy_until = max(busy_until, float(ends[before]) + waited_s) + seconds
            seconds = max(0.0, busy_until - float(ends[waited]) - waited_s)
            waited_s += seconds
        exposed_seconds.append((collective.kind, waited, seconds))
    return exposed_seconds


def merge_chunks(chunks: Sequence[Chunk], gradient_sizes: Sequence[float]) -> Chunk:
    """Several pieces as one; what stays at the end of each but the last are gradients of these sizes.

    What stays is in `peak_bytes`, not in `net_bytes`: it is for the caller to hold.
    """
    level = lasting_level = kept_gradient_bytes = 0.0
    peak_bytes = lasting_bytes_at_peak = gradient_bytes_at_peak = 0.0
    for chunk, size in zip(chunks, (*gradient_sizes, 0.0), strict=True):
        if level + kept_gradient_bytes + chunk.peak_bytes > peak_bytes:
            peak_bytes = level + kept_gradient_bytes + chunk.peak_bytes
            lasting_bytes_at_peak, gradient_bytes_at_peak = (
                lasting_level + chunk.lasting_bytes_at_peak,
                kept_gradient_bytes,
            )
        # What stays is on the trace until its next change, too: there is no looking in between.
        level, lasting_level, kept_gradient_bytes = (
            level + chunk.net_bytes,
            lasting_level + chunk.lasting_net_bytes,
            kept_gradient_bytes + size,
        )
    return Chunk(
        peak_bytes=peak_bytes,
        lasting_bytes_at_peak=lasting_bytes_at_peak,
        net_bytes=level,
        lasting_net_bytes=lasting_level,
        seconds=sum(chunk.seconds for chunk in chunks),
        num_kernels=sum(chunk.num_kernels for chunk in chunks),
        completed_gradient=None,
        layer_pass=chunks[-1].layer_pass,
        gradient_bytes_at_peak=gradient_bytes_at_peak,
        communication_s=sum(chunk.communication_s for chunk in chunks),
        transfer_s=sum(chunk.transfer_s for chunk in chunks),
        pieces=tuple(piece for chunk in chunks for piece in chunk.pieces),
        kept_sizes=tuple(gradient_sizes),
    )


def compute_offloaded_bytes(scaled_trace: ScaledTrace, batch_size: int, positions: Sequence[BlockPositions]) -> float:
    """Of the activations that are on the host when a micro-batch's forward pass is over."""
    batch_weight = scaled_trace.compute_batch_weight(batch_size)
    return sum(
        collective.compute_bytes(batch_weight) * positions[segment.place[0]].count_alike(segment.place[1])
        for segment in scaled_trace.segments
        if segment.phase == "forward" and segment.micro_batch == 0 and segment.place not in (None, LOSS_PLACE)
        for collective in segment.collectives
        if collective.kind == TO_HOST and segment.place is not None
    )


def find_segment_block_positions(
    segments: Sequence[SegmentAtBatch | ScaledSegment], block_counts: tuple[int, ...], period: int
) -> tuple[BlockPositions, ...]:
    """Where the blocks that were traced stand in the whole model, whose lists have so many."""
    traced_counts = [0] * len(block_counts)
    for place in (segment.place for segment in segments):
        if place is not None and place != LOSS_PLACE:
            traced_counts[place[0]] = max(traced_counts[place[0]], place[1] + 1)
    return tuple(
        BlockPositions(num_blocks, num_traced, period)
        for num_blocks, num_traced in zip(block_counts, traced_counts, strict=True)
    )


def expand_to_full_depth(
    segments: Sequence[SegmentAtBatch], block_counts: tuple[int, ...], period: int = 1
) -> Iterator[tuple[SegmentAtBatch, BlockPlace]]:
    """Every segment of the whole model in order, with the place it has there.

    Parameters
    ----------
    segments: sequence of SegmentAtBatch
        Of the shortened model.
    block_counts: tuple of int
        Blocks per list of the whole model.
    period: int
        Blocks after which they repeat.
    """
    block_positions = find_segment_block_positions(segments, block_counts, period)

    def find_repeated_list(segment: SegmentAtBatch) -> tuple[str, int, int] | None:
        """Of a block that stands for others: phase, micro-batch and list."""
        if segment.place is None or segment.place == LOSS_PLACE:
            return None
        list_index, position = segment.place
        is_repeated = position in block_positions[list_index].repeated_positions
        return (segment.phase, segment.micro_batch, list_index) if is_repeated else None

    for repeated_list, run in itertools.groupby(segments, find_repeated_list):
        if repeated_list is None:
            for segment in run:
                if segment.place is None or segment.place == LOSS_PLACE:
                    yield segment, segment.place
                else:
                    yield segment, (segment.place[0], block_positions[segment.place[0]].find_whole(segment.place[1]))
            continue
        phase, _, list_index = repeated_list
        positions = block_positions[list_index]
        segments_by_position = {segment.place[1]: segment for segment in run if segment.place is not None}
        whole_positions = positions.list_repeated_places()
        for position in whole_positions if phase == "forward" else reversed(whole_positions):
            if positions.find_traced(position) in segments_by_position:
                yield segments_by_position[positions.find_traced(position)], (list_index, position)
