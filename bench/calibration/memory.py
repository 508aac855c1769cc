"""Memory: how fast large tensors are read and written."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.calibration.sample import MEMORY, Sample
from bench.calibration.timer import timer_of

ELEMENTWISE = "mul"

SIZES = {"cpu": (3 * 2**20, 7 * 2**20), "cuda": (2**26, 2**28)}
"""Elements of fp32."""

REPETITIONS, QUICK_REPETITIONS = 15, 7
SETS = 3


def measure_memory(device: torch.device, *, quick: bool, progress: Callable[[str], None]) -> list[Sample]:
    """Time one elementwise operator on large tensors."""
    progress("memory")
    timer, repetitions = timer_of(device), QUICK_REPETITIONS if quick else REPETITIONS
    found = []
    for elements in SIZES[device.type]:
        pairs = [[torch.randn(elements, device=device) for _ in range(2)] for _ in range(SETS)]
        calls = [lambda pair=pair: torch.mul(pair[0], 1.5, out=pair[1]) for pair in pairs]  # type: ignore[misc]
        seconds = timer.repeated(calls, repetitions)
        found.append(Sample(MEMORY, ELEMENTWISE, "fp32", (elements,), 0.0, 8.0 * elements, seconds))
    return found
