"""A tape made ready to be played: at any batch size, at the model's true depth, in pieces between gradients.

What a tape counts grows linearly with the batch, so two traces foretell all others. A batch of one is traced itself:
where a dimension is 1, operators leave out copies that they make otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.simulate.kernels import Floats, Ints, Kernels
from bench.simulate.tape import LOSS, TRACED_BLOCKS, GradientEvent, Place, Segment, Trace, Visit

BATCHES = (2, 3)
"""Batch sizes that are traced to foretell all but 1."""

INNER = 2
"""The block that stands for the inner ones. The one before it is different: in backward it is the last of those that
hold what all blocks share, and releases it."""


@dataclass(frozen=True)
class Strip:
    """One segment of a tape at several batch sizes: what changes with the batch has a base and a slope."""

    phase: str
    micro_batch: int
    place: Place
    bounds: tuple[int, ...]
    """Where the pieces end, as indices into the changes: at each event, and at the end."""
    kernel_bounds: tuple[int, ...]
    events: tuple[GradientEvent | Visit, ...]
    """What ends each piece but the last."""
    changes: tuple[Floats, Floats]
    """Bytes allocated (negative: released), base and slope."""
    lasting: tuple[Floats, Floats]
    """The same of storages that outlive the segment they are made in, or were made in an earlier one."""
    shared: Ints
    """Per change the block list whose inner blocks' storages are all released here together, each in its turn; -1 for
    none. The trace shows it for one inner block."""
    kernels: tuple[Kernels, Kernels]
    """At the first and the second of the traced batch sizes."""
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Collective:
    """Ranks that share a layer exchange something, and computation waits for it."""

    kernel: int
    """Kernels of the segment started by then."""
    kind: str
    size: float
    slope: float

    def at(self, weight: float) -> float:
        """Bytes of the whole at a batch size (see `Reel.weight`)."""
        return self.size + weight * self.slope


@dataclass(frozen=True)
class Piece:
    """What happens between two gradients of a segment."""

    peak: float
    """Highest memory after any change within the piece, above that at its beginning, in bytes. Negative where a piece
    begins with a release, as of the gradient that ended the piece before it, and never comes up to that again."""
    lasting_at_peak: float
    """Of `peak`, storages that outlive their segment."""
    net: float
    lasting_net: float
    seconds: float
    """Of the device, nothing else going on."""
    kernels: int
    gradient: str | None
    """Parameter whose gradient is complete at the end."""
    gradients_at_peak: float = 0.0
    """Of `peak`, gradients that were completed before it within the piece."""
    communication: float = 0.0
    """Seconds in which nothing is computed, since ranks that share a layer exchange something; not in `seconds`."""
    visit: Visit | None = None
    """What begins or ends at the end."""


@dataclass(frozen=True, eq=False)
class Scene:
    """A segment at one batch size."""

    phase: str
    micro_batch: int
    place: Place
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Reel:
    """A tape that can be played at any batch size."""

    strips: tuple[Strip, ...]
    inputs: tuple[float, float]
    """Bytes of the micro-batches, base and slope."""
    batches: tuple[int, int]
    outputs: tuple[float, float]
    """Bytes of everything the model returns, base and slope."""
    logits: tuple[float, float]
    """The same of its logits alone."""

    def weight(self, batch_size: int) -> float:
        """How far the batch size is beyond the first traced one, in steps to the second."""
        first, second = self.batches
        return (batch_size - first) / (second - first) if second > first else 0.0


def make_reel(first: Trace, second: Trace, batches: tuple[int, int]) -> Reel:
    """Prepare what was traced at two batch sizes (or one, twice).

    Raises
    ------
    ValueError
        If the model does not do the same at both.
    """
    shared = _released_together(first.segments)
    strips = tuple(
        _strip(
            a, b, np.array([shared.get((index, position), -1) for position in range(len(a.changes))], dtype=np.int64)
        )
        for index, (a, b) in enumerate(_aligned(first, second))
    )
    return Reel(
        tuple(strip for strip in strips if len(strip.changes[0]) or len(strip.kernels[0]) or strip.collectives),
        (first.inputs_bytes, second.inputs_bytes - first.inputs_bytes),
        batches,
        (first.outputs_bytes, second.outputs_bytes - first.outputs_bytes),
        (first.logits_bytes, second.logits_bytes - first.logits_bytes),
    )


def batches_for(batch_size: int) -> tuple[int, int]:
    """Which batch sizes to trace for a batch of some size."""
    return (1, 1) if batch_size == 1 else BATCHES


def _aligned(first: Trace, second: Trace) -> Iterator[tuple[Segment, Segment]]:
    if len(first.segments) != len(second.segments):
        raise ValueError("the model runs differently at different batch sizes")
    for a, b in zip(first.segments, second.segments, strict=True):
        alike = (
            len(a.changes) == len(b.changes)
            and [kernel[0] for kernel in a.kernels] == [kernel[0] for kernel in b.kernels]
            and a.events == b.events
            and [(event.kernel, event.kind) for event in a.collectives]
            == [(event.kernel, event.kind) for event in b.collectives]
        )
        if not alike:
            raise ValueError(f"the model runs differently at different batch sizes, in {a.phase} of {a.place}")
        yield a, b


def _strip(a: Segment, b: Segment, shared: Ints) -> Strip:
    temporary = _temporary(a)
    sizes = np.array([size for size, _ in a.changes], dtype=float)
    slopes = np.array([size for size, _ in b.changes], dtype=float) - sizes
    lasting = ~temporary
    return Strip(
        phase=a.phase,
        micro_batch=a.micro_batch,
        place=a.place,
        bounds=(*(event.position for event in a.events), len(a.changes)),
        kernel_bounds=(*(event.kernel for event in a.events), len(a.kernels)),
        events=tuple(a.events),
        changes=(sizes, slopes),
        lasting=(sizes * lasting, slopes * lasting),
        shared=shared,
        kernels=(kernels_of(a), kernels_of(b)),
        collectives=tuple(
            Collective(one.kernel, one.kind, one.size, other.size - one.size)
            for one, other in zip(a.collectives, b.collectives, strict=True)
        ),
    )


def _released_together(segments: Sequence[Segment]) -> dict[tuple[int, int], int]:
    """Releases, by segment and change, of what every inner block made and all lose at the same time, with its list.

    Autocast's copies of the weights are such: they last until the forward pass is over. What is released in the pass
    of the block that comes next is not: of that each inner block releases its predecessor's.
    """
    made: dict[int, tuple[int, int]] = {}
    lost: dict[int, tuple[int, int]] = {}
    by_order: dict[tuple[int, int], int] = {}
    for index, segment in enumerate(segments):
        order = 0
        for position, (size, number) in enumerate(segment.changes):
            if size > 0:
                made[number] = index, order
                by_order[index, order] = number
                order += 1
            else:
                lost[number] = index, position
    places = {(segment.phase, segment.micro_batch, segment.place): index for index, segment in enumerate(segments)}
    found: dict[tuple[int, int], int] = {}
    for number, (index, order) in made.items():
        segment = segments[index]
        if segment.place is None or segment.place == LOSS or segment.place[1] != INNER or number not in lost:
            continue
        neighbour = places.get((segment.phase, segment.micro_batch, (segment.place[0], INNER - 1)))
        twin = by_order.get((neighbour, order)) if neighbour is not None else None
        where = lost[number]
        if twin is not None and where[0] != index and lost.get(twin, (None,))[0] == where[0]:
            found[where] = segment.place[0]
    return found


def _temporary(segment: Segment) -> np.ndarray:
    """Which changes belong to storages that are made and released within the segment."""
    count: dict[int, int] = {}
    for _, number in segment.changes:
        count[number] = count.get(number, 0) + 1
    return np.array([count[number] == 2 for _, number in segment.changes], dtype=bool)


def kernels_of(segment: Segment) -> Kernels:
    """A segment's kernels as arrays."""
    rows = segment.kernels
    dims = np.zeros((len(rows), 5))
    for index, row in enumerate(rows):
        dims[index, : len(row[3])] = row[3]
    return Kernels(
        operators=tuple(row[0] for row in rows),
        kinds=np.array([row[1] for row in rows], dtype=np.int64),
        formats=np.array([row[2] for row in rows], dtype=np.int64),
        dims=dims,
        flops=np.array([row[4] for row in rows], dtype=float),
        bytes_moved=np.array([row[5] for row in rows], dtype=float),
    )


def kernels_at(strip: Strip, weight: float) -> Kernels:
    """A strip's kernels at a batch size (see `Reel.weight`)."""
    first, second = strip.kernels
    if weight == 0.0:
        return first
    return Kernels(
        first.operators,
        first.kinds,
        first.formats,
        first.dims + weight * (second.dims - first.dims),
        first.flops + weight * (second.flops - first.flops),
        first.bytes_moved + weight * (second.bytes_moved - first.bytes_moved),
    )


def pieces(
    strip: Strip,
    weight: float,
    seconds: Floats | None,
    lengths: tuple[int, ...] = (),
    exchange: Callable[[str, float], float] = lambda kind, size: 0.0,
) -> tuple[Piece, ...]:
    """The pieces of a strip at a batch size.

    Parameters
    ----------
    weight: float
        As `Reel.weight` says for the batch size.
    lengths: tuple of int
        Blocks per list of the whole model; none if that is what was traced.
    seconds: array or None
        Of each kernel; None where speeds are unknown.
    exchange: callable
        Seconds of a collective among ranks that share a layer: of its kind and its bytes.
    """
    copies = np.ones(len(strip.shared))
    for index, length in enumerate(lengths):
        copies[strip.shared == index] = max(1, length - TRACED_BLOCKS + 1)
    changes = np.rint(strip.changes[0] + weight * strip.changes[1]) * copies
    lasting = np.rint(strip.lasting[0] + weight * strip.lasting[1]) * copies
    result = []
    start = kernel_start = 0
    for number, (end, kernel_end) in enumerate(zip(strip.bounds, strip.kernel_bounds, strict=True)):
        event = strip.events[number] if number < len(strip.events) else None
        level, lasting_level = np.cumsum(changes[start:end]), np.cumsum(lasting[start:end])
        highest = int(np.argmax(level)) if end > start else 0
        is_last = number == len(strip.bounds) - 1
        result.append(
            Piece(
                peak=float(level[highest]) if end > start else 0.0,
                lasting_at_peak=float(lasting_level[highest]) if end > start else 0.0,
                net=float(level[-1]) if end > start else 0.0,
                lasting_net=float(lasting_level[-1]) if end > start else 0.0,
                seconds=0.0 if seconds is None else float(seconds[kernel_start:kernel_end].sum()),
                kernels=kernel_end - kernel_start,
                gradient=event.parameter if isinstance(event, GradientEvent) else None,
                visit=event if isinstance(event, Visit) else None,
                communication=sum(
                    exchange(each.kind, each.at(weight))
                    for each in strip.collectives
                    if kernel_start <= each.kernel < kernel_end or (is_last and each.kernel == kernel_end)
                ),
            )
        )
        start, kernel_start = end, kernel_end
    return tuple(result)


def merged(pieces: Sequence[Piece], gradient_bytes: Sequence[float]) -> Piece:
    """Several pieces as one; what stays at the end of each but the last are gradients of these sizes.

    What stays is in `peak`, not in `net`: it is for the caller to hold.
    """
    level = lasting = kept = 0.0
    peak = lasting_at_peak = gradients_at_peak = 0.0
    for piece, size in zip(pieces, (*gradient_bytes, 0.0), strict=True):
        if level + kept + piece.peak > peak:
            peak = level + kept + piece.peak
            lasting_at_peak, gradients_at_peak = lasting + piece.lasting_at_peak, kept
        # What stays is on the tape until its next change, too: there is no looking in between.
        level, lasting, kept = level + piece.net, lasting + piece.lasting_net, kept + size
    return Piece(
        peak=peak,
        lasting_at_peak=lasting_at_peak,
        net=level,
        lasting_net=lasting,
        seconds=sum(piece.seconds for piece in pieces),
        kernels=sum(piece.kernels for piece in pieces),
        gradient=None,
        visit=pieces[-1].visit,
        gradients_at_peak=gradients_at_peak,
        communication=sum(piece.communication for piece in pieces),
    )


def running_order(scenes: tuple[Scene, ...], lengths: tuple[int, ...]) -> Iterator[tuple[Scene, Place]]:
    """Every scene of the whole model in order, with the place it has there.

    Parameters
    ----------
    scenes: tuple of Scene
        Of the shortened model.
    lengths: tuple of int
        Blocks per list of the whole model.
    """
    for scene in scenes:
        if scene.place is None or scene.place == LOSS:
            yield scene, scene.place
            continue
        index, position = scene.place
        length = lengths[index]
        if length <= TRACED_BLOCKS or position < INNER:
            yield scene, scene.place
        elif position > INNER:
            yield scene, (index, length - 1)
        else:
            inner = range(INNER, length - 1)
            for number in inner if scene.phase == "forward" else reversed(inner):
                yield scene, (index, number)
