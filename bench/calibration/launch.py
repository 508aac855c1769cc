"""The shortest time from one kernel to the next on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.calibration.sample import LAUNCH, Sample
from bench.calibration.timer import timer_of

KERNEL = "kernel"
"""Name of the samples of one kernel after the other with next to nothing to do."""

KERNELS = 500
REPETITIONS = 15


def measure_launch(device: torch.device, *, progress: Callable[[str], None]) -> list[Sample]:
    """Time kernels that a graph starts one after the other: the processor has no part in it.

    What starting an operator takes on a processor is in the steps of the smallest models (`bench.calibration.steps`).
    """
    if device.type != "cuda":
        return []
    progress("kernels in a graph")
    one = torch.ones(1, device=device)
    one.mul_(1.0)  # loads the kernel, which cannot be done within a graph
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            one.mul_(1.0)
    seconds = timer_of(device).repeated([graph.replay], REPETITIONS)
    each = tuple(time / KERNELS for time in seconds)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return [Sample(LAUNCH, KERNEL, "fp32", (KERNELS, multiprocessors), 0.0, 8.0, each)]
