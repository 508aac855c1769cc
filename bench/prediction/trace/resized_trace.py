"""The trace of a batch of any size from that of one wide batch.

A dimension of a tensor has the batch as a factor, or does not depend on it. So has every number of a trace: bytes of a
storage, dimensions and FLOPs of a kernel. A batch that is a prime, and no factor of any size of the model, tells them
apart; only the bytes that a kernel moves are a sum of both (`KernelRecord.growing_bytes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bench.prediction.trace.kernels import WIDE_BATCH, KernelRecord
from bench.prediction.trace.trace import Trace, TraceKey, TraceSegment


def can_resize(key: TraceKey) -> bool:
    """Whether traces of other batches follow from that of `WIDE_BATCH`.

    Not of experts, whose shares of the tokens are rounded, nor where something else is: a chunk of the loss, what is
    compiled or in FP8. On a CPU some operators allocate working memory by other rules. A batch of one is not asked for:
    where a dimension is 1, operators leave out copies that they make otherwise.
    """
    is_rounded = key.compile or key.compiles_loss or key.loss_chunks is not None or key.precision.uses_float8
    return (
        key.family.scales_with_batch
        and key.device != "cpu"
        and not is_rounded
        and all(size % WIDE_BATCH > 1 for size in _iterate_sizes(dataclasses.astuple(key)) if size >= WIDE_BATCH)
    )


def _iterate_sizes(value: object) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _iterate_sizes(item)


def resize_trace(trace: Trace, batch_size: int) -> Trace | None:
    """The trace of a batch, from that of `WIDE_BATCH`; None if it is not known of a kernel what it moves."""
    if any(kernel.growing_bytes is None for segment in trace.segments for kernel in segment.kernels):
        return None
    return Trace(
        [_resize_segment(segment, batch_size) for segment in trace.segments],
        _resize(trace.inputs_bytes, batch_size),
        _resize(trace.outputs_bytes, batch_size),
        _resize(trace.logits_bytes, batch_size),
        trace.parameters,
    )


def _resize(number: int, batch_size: int) -> int:
    per_sequence, rest = divmod(number, WIDE_BATCH)
    return number if rest else per_sequence * batch_size


def _resize_segment(segment: TraceSegment, batch_size: int) -> TraceSegment:
    return dataclasses.replace(
        segment,
        changes=[(_resize(size, batch_size), number) for size, number in segment.changes],
        kernels=[_resize_kernel(kernel, batch_size) for kernel in segment.kernels],
        collectives=[
            dataclasses.replace(collective, size=_resize(collective.size, batch_size))
            for collective in segment.collectives
        ],
    )


def _resize_kernel(kernel: KernelRecord, batch_size: int) -> KernelRecord:
    assert kernel.growing_bytes is not None
    fixed_bytes = kernel.bytes_moved - kernel.growing_bytes
    return kernel._replace(
        dims=tuple(_resize(size, batch_size) for size in kernel.dims),
        flops=_resize(kernel.flops, batch_size),
        bytes_moved=fixed_bytes + _resize(kernel.growing_bytes, batch_size),
        growing_bytes=None,
    )
