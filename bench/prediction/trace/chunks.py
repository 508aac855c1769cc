"""What happens between two gradients of a segment, at a batch size, and a whole model's segments at its true depth."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.models.checkpointing import BlockPositions
from bench.prediction.trace.kernels import FloatArray
from bench.prediction.trace.scaled_trace import ScaledSegment, StorageOrigin
from bench.prediction.trace.trace import (
    LOSS_PLACE,
    TO_DEVICE,
    TO_HOST,
    BlockPlace,
    GradientEvent,
    LayerPassEvent,
)
from bench.strategies.step_plan import EXPERT_GROUP


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
    token_s: float = 0.0
    """Of `communication_s`, sending tokens to experts and back."""
    pieces: tuple[MemoryPiece, ...] = field(default=(), compare=False)
    """The changes of memory that it sums up."""
    kept_sizes: tuple[float, ...] = ()
    """Bytes of the gradients that stay after each of the pieces but the last, where there are several."""


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


@dataclass(frozen=True, eq=False)
class SegmentAtBatch:
    """A segment at one batch size."""

    phase: str
    micro_batch: int
    place: BlockPlace
    chunks: tuple[Chunk, ...]

    @functools.cached_property
    def layer_passes(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks up to each beginning or end of a layer's pass, and those up to the segment's end."""
        ends = [number for number, chunk in enumerate(self.chunks, start=1) if chunk.layer_pass is not None]
        return tuple(self.chunks[start:end] for start, end in itertools.pairwise([0, *ends, len(self.chunks)]))

    @functools.cached_property
    def net_bytes(self) -> float:
        """Bytes held more when the segment is over than at its beginning."""
        return sum(chunk.net_bytes for chunk in self.chunks)

    @functools.cached_property
    def lasting_bytes(self) -> float:
        """Bytes of what stays when the segment is over, less what it freed of earlier ones."""
        return sum(chunk.lasting_net_bytes for chunk in self.chunks)


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
            repetitions[index] = block_positions[list_index].count_alike(position)
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
            (kind, group, seconds)
            for kind, group, kernels_before, seconds in exposed_seconds
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
                communication_s=sum(seconds for _, _, seconds in collective_seconds),
                transfer_s=sum(seconds for kind, _, seconds in collective_seconds if kind in (TO_HOST, TO_DEVICE)),
                token_s=sum(seconds for _, group, seconds in collective_seconds if group == EXPERT_GROUP),
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
) -> list[tuple[str, str, int, float]]:
    """Of each collective: its kind, its group, the kernels before it is waited for, and the seconds for which it is.

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
        exposed_seconds.append((collective.kind, collective.group, waited, seconds))
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
        token_s=sum(chunk.token_s for chunk in chunks),
        pieces=tuple(piece for chunk in chunks for piece in chunk.pieces),
        kept_sizes=tuple(gradient_sizes),
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


def count_segment_repetitions(
    segments: Sequence[SegmentAtBatch | ScaledSegment], block_positions: Sequence[BlockPositions]
) -> list[int]:
    """How often a step runs each segment of a shortened model: once, or for each block that is like the traced one."""
    return [
        1
        if segment.place is None or segment.place == LOSS_PLACE
        else block_positions[segment.place[0]].count_alike(segment.place[1])
        for segment in segments
    ]


@functools.lru_cache(maxsize=64)
def expand_to_full_depth(
    segments: tuple[SegmentAtBatch, ...], block_counts: tuple[int, ...], period: int = 1
) -> tuple[tuple[SegmentAtBatch, BlockPlace], ...]:
    """Every segment of the whole model in order, with the place it has there.

    Parameters
    ----------
    segments: tuple of SegmentAtBatch
        Of the shortened model.
    block_counts: tuple of int
        Blocks per list of the whole model.
    period: int
        Blocks after which they repeat.
    """
    return tuple(_iterate_at_full_depth(segments, block_counts, period))


def _iterate_at_full_depth(
    segments: tuple[SegmentAtBatch, ...], block_counts: tuple[int, ...], period: int
) -> Iterator[tuple[SegmentAtBatch, BlockPlace]]:
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
