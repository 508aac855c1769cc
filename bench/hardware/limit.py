"""A memory limit that really limits: a smaller device, tried on a larger one."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core.processes import THREAD_STACK_BYTES, return_freed_memory_at_once
from bench.core.units import GIB
from bench.hardware.description import MEMORY_SLACK_SHARE

if TYPE_CHECKING:
    import torch


class MemoryLimit:
    """Let this process allocate at most `limit_bytes` of device memory from now on.

    CUDA: the caching allocator's share of each device: what it holds (reserved), blocks that it keeps for reuse and
    cuBLAS's workspaces included. CUDA's context (0.3 to 0.6 GiB, with the code of kernels) and NCCL's buffers (0.3 to
    2 GiB) lie outside of it, as they lie outside of what the allocator reports: on a real card of that size they would
    have to fit beside it. A card's own size can be asked for as its vendor gives it: where that is up to
    `MEMORY_SLACK_SHARE` more than CUDA reports, the limit is all that CUDA reports.

    CPU: the process's data segment (RLIMIT_DATA), counted from what it uses when the limit is set, so that Python
    and the libraries do not count against the model; gloo's buffers and threads started later do. So that the
    segment follows what is allocated, a limited process gives freed blocks back at once (which is slower than to keep
    them: `bench.core.processes.keep_freed_memory`).

    Parameters
    ----------
    limit_bytes: int
        Of each device.
    devices: sequence of torch.device
        That the rank drives: each has this limit.

    Raises
    ------
    ValueError
        If the limit is larger than the GPU.
    """

    def __init__(self, limit_bytes: int, devices: Sequence[torch.device]) -> None:
        self._original_rlimit: tuple[int, int] | None = None
        self.limit_bytes = limit_bytes
        """What a device may really hold: less than what was asked for where the device has a little less."""
        if devices[0].type == "cuda":
            for device in devices:
                self._limit_gpu(device)
        else:
            return_freed_memory_at_once()
            self._original_rlimit = resource.getrlimit(resource.RLIMIT_DATA)
            self._set_limit(read_data_segment_bytes() + limit_bytes)

    def _limit_gpu(self, device: torch.device) -> None:
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        if self.limit_bytes > (1 + MEMORY_SLACK_SHARE) * total:
            raise ValueError(
                f"a limit of {self.limit_bytes / GIB:.1f} GiB is more than the GPU has ({total / GIB:.1f} GiB)"
            )
        self.limit_bytes = min(self.limit_bytes, total)
        torch.cuda.set_per_process_memory_fraction(self.limit_bytes / total, device)

    def lift(self) -> bool:
        """Give memory back to a process that has run out, so that it can say so.

        Returns
        -------
        bool
            Whether so little of a CPU limit was left that no thread could be started, for lack of memory for its stack.
        """
        if self._original_rlimit is None:
            return False
        current_limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        resource.setrlimit(resource.RLIMIT_DATA, self._original_rlimit)
        self._original_rlimit = None
        return read_data_segment_bytes() + 2 * THREAD_STACK_BYTES > current_limit

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Around work of the harness itself: what it needs, and keeps, does not count."""
        if self._original_rlimit is None:
            yield
            return
        current_limit, previous_bytes = resource.getrlimit(resource.RLIMIT_DATA)[0], read_data_segment_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, self._original_rlimit)
        try:
            yield
        finally:
            self._set_limit(current_limit + max(0, read_data_segment_bytes() - previous_bytes))

    def _set_limit(self, total_bytes: int) -> None:
        assert self._original_rlimit is not None
        resource.setrlimit(resource.RLIMIT_DATA, (total_bytes, self._original_rlimit[1]))


def read_data_segment_bytes() -> int:
    """Size of this process's data segment, which RLIMIT_DATA limits: private writable memory, touched or not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData line")
