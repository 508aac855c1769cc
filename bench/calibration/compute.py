"""Everything that one device alone is timed at for a calibration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.calibration.attention import measure_attention
from bench.calibration.formats import formats_of
from bench.calibration.launch import measure_launch
from bench.calibration.matmul import measure_matmul
from bench.calibration.memory import measure_memory
from bench.calibration.sample import Sample
from bench.calibration.steps import measure_steps
from bench.simulate.reel import NEW_EVERY_TIME_BYTES


def measure_compute(
    device: torch.device, threads: int, *, quick: bool, progress: Callable[[str], None]
) -> list[Sample]:
    """Time matrix products, attention, operators, the optimizer and what starting work takes.

    Parameters
    ----------
    device: torch.device
        This machine's processor, or one GPU.
    threads: int
        Threads a rank computes with on a CPU.
    quick: bool
        Fewer sizes and repetitions, for tests: less than 40 seconds on a CPU.
    progress: callable
        Told in a few words what is timed next.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if device.type == "cpu":
            _settle_allocator()
        return [
            *measure_launch(device, progress=progress),
            *measure_steps(device, formats_of(device), quick=quick, progress=progress),
            *(measure_matmul(device, quick=quick, progress=progress) if device.type == "cuda" else ()),
            *measure_attention(device, quick=quick, progress=progress),
            *measure_memory(device, quick=quick, progress=progress),
        ]
    finally:
        torch.set_num_threads(before)


def _settle_allocator() -> None:
    """Have the C library keep blocks it would give back, as it comes to do in any run after some steps.

    glibc raises the size from which on blocks are new every time to that of the largest such block ever freed.
    """
    torch.empty(NEW_EVERY_TIME_BYTES - 2**20, dtype=torch.uint8)
