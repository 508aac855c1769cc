"""Memory: how fast large tensors are read and written, and how fast a CPU's operating system provides new memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from bench.calibration.sample import MEMORY, Sample
from bench.calibration.timer import timer_of
from bench.simulate.reel import NEW_EVERY_TIME_BYTES

ELEMENTWISE, NEW = "mul", "new memory"

SIZES = {"cpu": (3 * 2**20, 7 * 2**20), "cuda": (2**26, 2**28)}
"""Elements of fp32. On a CPU results stay below what is new memory every time."""

NEW_BYTES = (NEW_EVERY_TIME_BYTES + 2**23, 3 * NEW_EVERY_TIME_BYTES)
REPETITIONS, QUICK_REPETITIONS = 15, 7
SETS = 3


def measure_memory(device: torch.device, *, quick: bool, progress: Callable[[str], None]) -> list[Sample]:
    """Time one elementwise operator on large tensors; on a CPU writing to new memory beside writing to old."""
    progress("memory")
    timer, repetitions = timer_of(device), QUICK_REPETITIONS if quick else REPETITIONS
    found = []
    for elements in SIZES[device.type]:
        pairs = [[torch.randn(elements, device=device) for _ in range(2)] for _ in range(SETS)]
        calls = [lambda pair=pair: torch.mul(pair[0], 1.5, out=pair[1]) for pair in pairs]  # type: ignore[misc]
        seconds = timer.repeated(calls, repetitions)
        found.append(Sample(MEMORY, ELEMENTWISE, "fp32", (elements,), 0.0, 8.0 * elements, seconds))
    if device.type == "cpu":
        found += [_new_memory(size, repetitions) for size in NEW_BYTES]
    return found


def _new_memory(size: int, repetitions: int) -> Sample:
    """What filling a block of memory takes longer when it is new."""
    elements = size // 4
    old = torch.ones(elements)
    timer = timer_of(torch.device("cpu"))

    def new() -> None:
        # From the operating system itself: the C library may have some that was freed before.
        torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32).fill_(1.0)

    pairs = [(timer.stretch([lambda: old.fill_(1.0)]), timer.stretch([new])) for _ in range(repetitions)]
    seconds = tuple(max(first - again, first / 100) for again, first in pairs)
    return Sample(MEMORY, NEW, "fp32", (elements,), 0.0, float(size), seconds)
