"""A memory limit that really limits: a smaller device, tried on a larger one."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


class MemoryLimit:
    """Let this process allocate at most `limit_bytes` of device memory from now on.

    CUDA: the caching allocator's share of the device. The context and NCCL's buffers lie outside it, as they lie
    outside what the allocator reports. CPU: the process's data segment (RLIMIT_DATA), counted from what it uses
    when the limit is set, so that Python and the libraries do not count against the model.

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
        self._restore: tuple[int, int] | None = None
        if limit_bytes is None:
            return
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            if limit_bytes > total:
                raise ValueError(
                    f"a limit of {limit_bytes / 2**30:.1f} GiB is more than the GPU has ({total / 2**30:.1f} GiB)"
                )
            torch.cuda.set_per_process_memory_fraction(limit_bytes / total, device)
        else:
            self._restore = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (data_segment_bytes() + limit_bytes, self._restore[1]))

    def lift(self) -> None:
        """Give memory back to a process that has run out, so that it can say so."""
        if self._restore is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._restore)
            self._restore = None


def data_segment_bytes() -> int:
    """Size of this process's data segment, which RLIMIT_DATA limits: private writable memory, touched or not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData line")
