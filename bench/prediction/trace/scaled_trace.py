"""A trace made ready to be simulated at any batch size.

What a trace counts grows linearly with the batch, so two traces give all others. A batch of one is traced itself:
where a dimension is 1, operators leave out copies that they make otherwise. So is every batch of compiled blocks: what
the compiler keeps for backward and what it fuses depends on the size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.models.checkpointing import BlockPositions
from bench.prediction.trace.kernels import NUM_DIMS, FloatArray, IntArray, KernelArrays
from bench.prediction.trace.trace import (
    LOSS_PLACE,
    TO_HOST,
    BlockPlace,
    GradientEvent,
    LayerPassEvent,
    LocatedParameter,
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


def _is_block(place: BlockPlace) -> bool:
    return place is not None and place != LOSS_PLACE


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
    parameters: tuple[LocatedParameter, ...]
    """Of a stage, in the order of its module."""

    def compute_batch_weight(self, batch_size: int) -> float:
        """How far the batch size is beyond the first traced one, in steps to the second."""
        first, second = self.traced_batch_sizes
        return (batch_size - first) / (second - first) if second > first else 0.0


def build_scaled_trace(
    first: Trace, second: Trace, batch_sizes: tuple[int, int], num_first: int = 1, period: int = 1
) -> ScaledTrace:
    """Prepare what was traced at two batch sizes (or one, twice), of lists whose blocks repeat after `period` of them,
    but for `num_first` that come before.

    Raises
    ------
    ValueError
        If the model does not do the same at both.
    """
    joint_frees = _find_joint_frees(first.segments, num_first, period)
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
        first.parameters,
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
            and [kernel.operator for kernel in a.kernels] == [kernel.operator for kernel in b.kernels]
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


def _find_joint_frees(
    segments: Sequence[TraceSegment], num_first: int, period: int
) -> dict[tuple[int, int], tuple[int, int]]:
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
    repeated_positions = range(num_first + period, num_first + 2 * period)
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
    dims = np.zeros((len(records), NUM_DIMS))
    for index, record in enumerate(records):
        dims[index, : len(record.dims)] = record.dims
    return KernelArrays(
        operators=tuple(record.operator for record in records),
        kinds=np.array([record.kind for record in records], dtype=np.int64),
        formats=np.array([record.format for record in records], dtype=np.int64),
        dims=dims,
        flops=np.array([record.flops for record in records], dtype=float),
        bytes_moved=np.array([record.bytes_moved for record in records], dtype=float),
        row_bytes=np.array([record.row_bytes for record in records], dtype=np.int64),
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
        np.minimum(first.row_bytes, second.row_bytes),
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
