"""The whole fake CUDA in a process, whatever it runs: what `everywhere` installs."""

from __future__ import annotations

from bench.core import processes
from tests.fakecuda import nccl, nvml, profiler, runtime


def install() -> None:
    """As on a machine with GPUs, children come from a forkserver."""
    runtime.install()
    nccl.install()
    nvml.install()
    profiler.install()
    processes.GPU_DEVICE_FILES = ("null",)
