"""A step of several devices that one process drives (`torch.nn.DataParallel`), as the first and the others meet it.

The model runs on every device's part of the batch. The loss is computed on the first, over the outputs of all. In
forward each device's kernels are started by a Python thread of its own, and only one of them runs at a time (the global
interpreter lock): while one kernel is started here, one is on each other device, so that a kernel takes as many times
longer to start as there are devices. Backward is started by autograd's threads, one per device, which need no Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.prediction.trace.scaled_trace import Chunk, SegmentAtBatch
from bench.prediction.trace.trace import LOSS_PLACE


def build_first_device_segments(
    device_segments: Sequence[SegmentAtBatch], batch_segments: Sequence[SegmentAtBatch], num_devices: int
) -> tuple[SegmentAtBatch, ...]:
    """What the first device does.

    Parameters
    ----------
    device_segments, batch_segments: sequence of Scene
        Of a device's part of the batch, and of the whole batch: the loss is taken from these.
    """
    first_device_segments = []
    extra_bytes = extra_lasting_bytes = 0.0
    for segment, batch_segment in zip(device_segments, batch_segments, strict=True):
        if segment.place == LOSS_PLACE:
            extra_bytes += _sum_over_chunks(batch_segment, "net_bytes") - _sum_over_chunks(segment, "net_bytes")
            extra_lasting_bytes += _sum_over_chunks(batch_segment, "lasting_net_bytes") - _sum_over_chunks(
                segment, "lasting_net_bytes"
            )
            first_device_segments.append(batch_segment)
        elif segment.phase == "backward" and extra_bytes:
            # The gradient of all outputs goes when the model's last layer has used its part of it.
            last_chunk = segment.chunks[-1]
            last_chunk = dataclasses.replace(
                last_chunk,
                net_bytes=last_chunk.net_bytes - extra_bytes,
                lasting_net_bytes=last_chunk.lasting_net_bytes - extra_lasting_bytes,
            )
            first_device_segments.append(dataclasses.replace(segment, chunks=(*segment.chunks[:-1], last_chunk)))
            extra_bytes = extra_lasting_bytes = 0.0
        elif segment.phase == "forward":
            chunks = (
                dataclasses.replace(chunk, num_kernels=chunk.num_kernels * num_devices) for chunk in segment.chunks
            )
            first_device_segments.append(dataclasses.replace(segment, chunks=tuple(chunks)))
        else:
            first_device_segments.append(segment)
    return tuple(first_device_segments)


def build_other_device_segments(device_segments: Sequence[SegmentAtBatch]) -> tuple[SegmentAtBatch, ...]:
    """What any other device does: no loss, of whose gradient its part arrives."""
    return tuple(
        dataclasses.replace(
            segment,
            chunks=(
                _build_memory_chunk(
                    _sum_over_chunks(segment, "net_bytes"), _sum_over_chunks(segment, "lasting_net_bytes")
                ),
            ),
        )
        if segment.place == LOSS_PLACE
        else segment
        for segment in device_segments
    )


def _build_memory_chunk(net_bytes: float, lasting_net_bytes: float) -> Chunk:
    """Memory that is taken (negative: given back), and no work."""
    peak_bytes = max(net_bytes, 0.0)
    return Chunk(
        peak_bytes=peak_bytes,
        lasting_bytes_at_peak=min(peak_bytes, max(lasting_net_bytes, 0.0)),
        net_bytes=net_bytes,
        lasting_net_bytes=lasting_net_bytes,
        seconds=0.0,
        num_kernels=0,
        completed_gradient=None,
    )


def _sum_over_chunks(segment: SegmentAtBatch, field_name: str) -> float:
    return sum(float(getattr(chunk, field_name)) for chunk in segment.chunks)
