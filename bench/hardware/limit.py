"""A memory limit that really limits: a smaller device, tried on a larger one."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.hardware.heap import give_memory_back_at_once, keep_freed_memory


class MemoryLimit:
    """Let this process allocate at most `limit_bytes` of device memory from now on.

    CUDA: the caching allocator's share of the device. The context and NCCL's buffers lie outside it, as they lie
    outside what the allocator reports.

    CPU: the process's data segment (RLIMIT_DATA), counted from what it uses when the limit is set, so that Python
    and the libraries do not count against the model; gloo's buffers and threads started later do. So that the
    segment follows what is allocated, a limited process gives freed blocks back at once (which is slower); without a
    limit it keeps them.

    Parameters
    ----------
    limit_bytes: int or None
        None limits nothing.
    device: torch.device
        The rank's device.

    Raises
    ------
    ValueError
        If the limit is larger than the GPU.
    """

    def __init__(self, limit_bytes: int | None, device: torch.device) -> None:
        self._original: tuple[int, int] | None = None
        if limit_bytes is None:
            if device.type == "cpu":
                keep_freed_memory()
            return
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            if limit_bytes > total:
                raise ValueError(
                    f"a limit of {limit_bytes / 2**30:.1f} GiB is more than the GPU has ({total / 2**30:.1f} GiB)"
                )
            torch.cuda.set_per_process_memory_fraction(limit_bytes / total, device)
        else:
            give_memory_back_at_once()
            self._original = resource.getrlimit(resource.RLIMIT_DATA)
            self._allow(data_segment_bytes() + limit_bytes)

    def lift(self) -> None:
        """Give memory back to a process that has run out, so that it can say so."""
        if self._original is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._original)
            self._original = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Around work of the harness itself: what it needs, and keeps, does not count."""
        if self._original is None:
            yield
            return
        allowed, before = resource.getrlimit(resource.RLIMIT_DATA)[0], data_segment_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, self._original)
        try:
            yield
        finally:
            self._allow(allowed + max(0, data_segment_bytes() - before))

    def _allow(self, total_bytes: int) -> None:
        assert self._original is not None
        resource.setrlimit(resource.RLIMIT_DATA, (total_bytes, self._original[1]))


def data_segment_bytes() -> int:
    """Size of this process's data segment, which RLIMIT_DATA limits: private writable memory, touched or not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData line")
