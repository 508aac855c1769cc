"""Memory: how fast large tensors are read and written."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.calibration.sample import MEMORY, CalibrationSample
from bench.calibration.timer import build_timer
from bench.core.units import MIB

ELEMENTWISE_OPERATOR = "mul"

ELEMENT_COUNTS = {"cpu": (3 * MIB, 7 * MIB), "cuda": (2**26, 2**28)}
"""Elements of fp32."""

REPETITIONS, QUICK_REPETITIONS = 15, 7
TENSOR_PAIRS = 3


def measure_memory(device: torch.device, *, quick: bool, on_progress: Callable[[str], None]) -> list[CalibrationSample]:
    """Time one elementwise operator on large tensors."""
    on_progress("memory")
    timer, repetitions = build_timer(device), QUICK_REPETITIONS if quick else REPETITIONS
    samples = []
    for element_count in ELEMENT_COUNTS[device.type]:
        pairs = [[torch.randn(element_count, device=device) for _ in range(2)] for _ in range(TENSOR_PAIRS)]
        calls = [lambda pair=pair: torch.mul(pair[0], 1.5, out=pair[1]) for pair in pairs]  # type: ignore[misc]
        seconds = timer.time_repetitions(calls, repetitions)
        samples.append(
            CalibrationSample(MEMORY, ELEMENTWISE_OPERATOR, "fp32", (element_count,), 0.0, 8.0 * element_count, seconds)
        )
    return samples
