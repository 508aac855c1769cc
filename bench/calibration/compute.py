"""Everything that one device alone is timed at for a calibration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.calibration.attention import measure_attention
from bench.calibration.formats import list_formats
from bench.calibration.kernel_launch import measure_launch
from bench.calibration.matmul import measure_matmul
from bench.calibration.memory import measure_memory
from bench.calibration.sample import CalibrationSample
from bench.calibration.steps import measure_steps
from bench.hardware.limit import keep_freed_memory


def measure_compute(
    device: torch.device, threads: int, *, quick: bool, on_progress: Callable[[str], None]
) -> list[CalibrationSample]:
    """Time matrix products, attention, operators, the optimizer and what starting work takes.

    Parameters
    ----------
    device: torch.device
        This machine's processor, or one GPU.
    threads: int
        Threads a rank computes with on a CPU.
    quick: bool
        Fewer sizes and repetitions, for tests: less than 40 seconds on a CPU.
    on_progress: callable
        Told in a few words what is timed next.
    """
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if device.type == "cpu":
            keep_freed_memory()  # as runs do
        return [
            *measure_launch(device, on_progress=on_progress),
            *measure_steps(device, list_formats(device), quick=quick, on_progress=on_progress),
            *(measure_matmul(device, quick=quick, on_progress=on_progress) if device.type == "cuda" else ()),
            *measure_attention(device, quick=quick, on_progress=on_progress),
            *measure_memory(device, quick=quick, on_progress=on_progress),
        ]
    finally:
        torch.set_num_threads(previous_threads)
