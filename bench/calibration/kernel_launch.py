"""The shortest time from one kernel to the next on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.calibration.sample import LAUNCH, CalibrationSample
from bench.calibration.timer import build_timer

KERNEL_SAMPLE = "kernel"
"""Name of the samples of one kernel after the other with next to nothing to do."""

KERNELS_PER_GRAPH = 500
REPETITIONS = 15


def measure_launch(device: torch.device, *, on_progress: Callable[[str], None]) -> list[CalibrationSample]:
    """Time kernels that a graph starts one after the other: the processor has no part in it.

    What starting an operator takes on a processor is in the steps of the smallest models (`bench.calibration.steps`).
    """
    if device.type != "cuda":
        return []
    on_progress("kernels in a graph")
    tensor = torch.ones(1, device=device)
    tensor.mul_(1.0)  # loads the kernel, which cannot be done within a graph
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS_PER_GRAPH):
            tensor.mul_(1.0)
    replay_seconds = build_timer(device).time_repetitions([graph.replay], REPETITIONS)
    kernel_seconds = tuple(time / KERNELS_PER_GRAPH for time in replay_seconds)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return [
        CalibrationSample(LAUNCH, KERNEL_SAMPLE, "fp32", (KERNELS_PER_GRAPH, multiprocessors), 0.0, 8.0, kernel_seconds)
    ]
