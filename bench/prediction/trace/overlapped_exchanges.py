"""Tensor parallelism whose exchanges go on beside products as TransformerEngine's do (its userbuffers), on the trace of
a model that waits for each.

Forward, what a product needs comes, or what it makes goes, while it is computed, part by part. Backward, each layer has
two products, of the gradients of its input and of its weight, one of which goes on beside the exchange. Which is which
for each layer of a block: ``TransformerLayerTPOverlapCfg`` in ``src/megatron/bridge/training/comm_overlap.py`` of
NVIDIA-NeMo/Megatron-Bridge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.prediction.trace.kernels import MATMUL, KernelRecord
from bench.prediction.trace.trace import LOSS_PLACE, CollectiveEvent, TraceSegment
from bench.strategies.step_plan import TENSOR_GROUP

SHARE_OF_PRODUCTS = {"forward": 1.0, "backward": 0.5}
"""Of the products beside an exchange, those that go on meanwhile."""


def overlap_exchanges(segments: Sequence[TraceSegment]) -> None:
    """Have the tensor-parallel exchanges of blocks go on beside the products next to them."""
    for segment in segments:
        if segment.place is not None and segment.place != LOSS_PLACE:
            segment.collectives = [_overlap(event, segment) for event in segment.collectives]


def _overlap(event: CollectiveEvent, segment: TraceSegment) -> CollectiveEvent:
    if event.group != TENSOR_GROUP or event.waited_kernel is not None:
        return event
    if event.kind == "all-gather":
        count = _count_beside(segment.kernels[event.kernel :], segment.phase)
        return dataclasses.replace(event, waited_kernel=event.kernel + count)
    if event.kind == "reduce-scatter":
        before = segment.kernels[: event.kernel]
        num_sums = next((index for index, kernel in enumerate(reversed(before)) if kernel.kind == MATMUL), 0)
        last = len(before) - num_sums
        count = _count_beside(before[:last][::-1], segment.phase)
        return dataclasses.replace(event, kernel=last - count, waited_kernel=event.kernel)
    return event


def _count_beside(kernels: Sequence[KernelRecord], phase: str) -> int:
    """How many of the products that the kernels begin with go on beside an exchange."""
    num_products = next((index for index, kernel in enumerate(kernels) if kernel.kind != MATMUL), len(kernels))
    return round(SHARE_OF_PRODUCTS[phase] * num_products)
