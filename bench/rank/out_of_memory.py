"""Recognise running out of memory, wherever it was wrapped, and how much was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

BYTES_PER_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

HOST_REQUEST_PATTERN = re.compile(r"you tried to allocate (?P<amount>\d+) (?P<unit>bytes)")
"""torch's CPU allocator."""

DEVICE_REQUEST_PATTERNS = (
    re.compile(r"Tried to allocate (?P<amount>[\d.]+) (?P<unit>bytes|[KMGT]iB)"),  # torch's caching allocator
    re.compile(r"Requested\s*: (?P<amount>[\d.]+) (?P<unit>bytes|[KMGT]iB)"),  # cudaMallocAsync
)

DEVICE_OOM_PATTERN = re.compile(
    r"(CUDA|HIP) out of memory"
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|Cuda failure (2 )?'out of memory'"  # NCCL's, with a number since 2.20
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
)
"""Of errors that say that a GPU's memory ran out. That other memory ran out is a fault of the machine: page-locked
memory that a network adapter may not register (``ibv_reg_mr … Cannot allocate memory``), threads, shared memory."""

HOST_OOM_PATTERN = re.compile(r"std::bad_alloc|MemoryError|Cannot allocate memory|out of memory")
"""Of errors that say that a process's memory ran out."""

THREAD_START_PATTERN = re.compile(r"can't start new thread|Resource temporarily unavailable")
"""Of errors that say that a thread could not be started: for lack of memory for its stack, or of threads."""

MAX_ROUNDING_SHARE = 0.01
"""How far the amount in a message, which is rounded, may be from the one that the allocator reported."""


def find_out_of_memory_error(
    error: BaseException, device: str, *, offloads: bool = False, limit_exhausted: bool = False
) -> BaseException | None:
    """Of an exception and what it was raised from, the one that says that memory ran out; None if none does.

    Parameters
    ----------
    device: str
        cpu or cuda: the kind of device whose memory counts.
    offloads: bool
        The run keeps something in the memory of the machine around its GPU, which counts as well.
    limit_exhausted: bool
        Next to nothing is left of a memory limit of this process, so that a thread that cannot be started has no
        memory for its stack.
    """
    for linked_error in walk_error_chain(error):
        text = str(linked_error)
        if isinstance(linked_error, torch.OutOfMemoryError) or DEVICE_OOM_PATTERN.search(text):
            return linked_error
        if (device == "cpu" or offloads) and (
            isinstance(linked_error, MemoryError) or HOST_REQUEST_PATTERN.search(text)
        ):
            return linked_error
        match = HOST_OOM_PATTERN.search(text) or (limit_exhausted and THREAD_START_PATTERN.search(text))
        if device == "cpu" and isinstance(linked_error, (RuntimeError, OSError)) and match:
            return linked_error
    return None


def walk_error_chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it holds and what it was raised from: each once, the outermost first.

    Followed are ``__cause__``; ``__context__`` unless it was suppressed; the members of a group; and the
    ``inner_exception`` of torch.compile's errors, which are raised ``from None``.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        linked_error = pending.pop(0)
        if id(linked_error) in seen:
            continue
        seen.add(id(linked_error))
        yield linked_error
        inner = getattr(linked_error, "inner_exception", None)
        context = None if linked_error.__suppress_context__ else linked_error.__context__
        members = linked_error.exceptions if isinstance(linked_error, BaseExceptionGroup) else ()
        pending += [
            candidate
            for candidate in (linked_error.__cause__, inner, context, *members)
            if isinstance(candidate, BaseException)
        ]


def find_requested_bytes(error: BaseException, observed_bytes: int | None = None) -> int | None:
    """Bytes that the failed allocation asked for, as far as anybody says.

    The CPU's allocator says what the tensor takes. CUDA's caching allocator says, in its message as to its observers,
    the segment it asked the driver for: what the tensor takes, but 2 MiB where that is up to 1 MiB, 20 MiB where it is
    below 10 MiB, else rounded up to a multiple of 2 MiB.

    Parameters
    ----------
    observed_bytes: int or None
        What the allocator last reported: the message's amount, but not rounded for a reader. Left out where it is of
        an earlier request, after which the run went on.
    """
    text = str(error)
    for pattern in (HOST_REQUEST_PATTERN, *DEVICE_REQUEST_PATTERNS):
        if match := pattern.search(text):
            requested_bytes = round(float(match["amount"]) * BYTES_PER_UNIT[match["unit"]])
            return (
                observed_bytes
                if observed_bytes is not None
                and abs(observed_bytes - requested_bytes) <= MAX_ROUNDING_SHARE * requested_bytes
                else requested_bytes
            )
    return observed_bytes if isinstance(error, torch.OutOfMemoryError) else None


def observe_failed_cuda_allocations() -> Callable[[], int | None]:
    """Have the CUDA allocator report failed requests to the byte, which its message rounds.

    Returns
    -------
    Callable
        Bytes of the last failed request, None before one, and always where the allocator in use reports none
        (``PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync``).
    """
    failed_requests: list[int] = []

    def observe(device: int, requested_bytes: int, device_total: int, device_free: int) -> None:
        failed_requests.append(requested_bytes)

    try:
        torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]
    except RuntimeError as error:
        print(f"out-of-memory rows will have no bytes: {error}", flush=True)
    return lambda: failed_requests[-1] if failed_requests else None
