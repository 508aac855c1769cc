"""Recognise running out of memory, and how much was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

ASKED = (
    re.compile(r"you tried to allocate (?P<amount>\d+) (?P<unit>bytes)"),  # CPU allocator
    re.compile(r"Tried to allocate (?P<amount>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB)"),  # CUDA allocator
)
UNSIZED = re.compile(
    r"std::bad_alloc|Cannot allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED|can't start new thread"
    r"|Resource temporarily unavailable"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the device or under a CPU memory limit."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, (RuntimeError, OSError)) and bool(
        any(pattern.search(text) for pattern in ASKED) or UNSIZED.search(text)
    )


def bytes_asked(error: BaseException) -> int | None:
    """Bytes the failed allocation asked for, as far as the message says."""
    for pattern in ASKED:
        if match := pattern.search(str(error)):
            return round(float(match["amount"]) * UNITS[match["unit"]])
    return None


def watch_cuda_allocations() -> Callable[[], int | None]:
    """Have the CUDA allocator report failed requests to the byte, which its message rounds.

    Returns
    -------
    Callable
        Bytes of the last failed request, None before one.
    """
    last: list[int] = []

    def observe(device: int, asked: int, device_total: int, device_free: int) -> None:
        last.append(asked)

    torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]
    return lambda: last[-1] if last else None
