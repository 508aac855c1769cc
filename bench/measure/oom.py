"""Recognise running out of memory, wherever it was wrapped, and how much was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

HOST_ASKED = re.compile(r"you tried to allocate (?P<amount>\d+) (?P<unit>bytes)")
"""torch's CPU allocator."""

DEVICE_ASKED = (
    re.compile(r"Tried to allocate (?P<amount>[\d.]+) (?P<unit>bytes|[KMGT]iB)"),  # torch's caching allocator
    re.compile(r"Requested\s*: (?P<amount>[\d.]+) (?P<unit>bytes|[KMGT]iB)"),  # cudaMallocAsync
)

DEVICE_WORDS = re.compile(
    r"(CUDA|HIP) out of memory"
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|Cuda failure (2 )?'out of memory'"  # NCCL's, with a number since 2.20
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
)
"""Of errors that say that a GPU's memory ran out. That other memory ran out is a fault of the machine: page-locked
memory that a network adapter may not register (``ibv_reg_mr … Cannot allocate memory``), threads, shared memory."""

HOST_WORDS = re.compile(r"std::bad_alloc|MemoryError|Cannot allocate memory|out of memory")
"""Of errors that say that a process's memory ran out."""

THREAD_WORDS = re.compile(r"can't start new thread|Resource temporarily unavailable")
"""Of errors that say that a thread could not be started: for lack of memory for its stack, or of threads."""

CLOSE = 0.01
"""How far the amount in a message, which is rounded, may be from the one that the allocator reported."""


def out_of_memory(
    error: BaseException, device: str, *, offloads: bool = False, exhausted: bool = False
) -> BaseException | None:
    """Of an exception and what it was raised from, the one that says that memory ran out; None if none does.

    Parameters
    ----------
    device: str
        cpu or cuda: the kind of device whose memory counts.
    offloads: bool
        The run keeps something in the memory of the machine around its GPU, which counts as well.
    exhausted: bool
        Next to nothing is left of a memory limit of this process, so that a thread that cannot be started has no
        memory for its stack.
    """
    for link in chain(error):
        text = str(link)
        if isinstance(link, torch.OutOfMemoryError) or DEVICE_WORDS.search(text):
            return link
        if (device == "cpu" or offloads) and (isinstance(link, MemoryError) or HOST_ASKED.search(text)):
            return link
        words = HOST_WORDS.search(text) or (exhausted and THREAD_WORDS.search(text))
        if device == "cpu" and isinstance(link, (RuntimeError, OSError)) and words:
            return link
    return None


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it holds and what it was raised from: each once, the outermost first.

    Followed are ``__cause__``; ``__context__`` unless it was suppressed; the members of a group; and the
    ``inner_exception`` of torch.compile's errors, which are raised ``from None``.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        inner = getattr(link, "inner_exception", None)
        context = None if link.__suppress_context__ else link.__context__
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        waiting += [found for found in (link.__cause__, inner, context, *members) if isinstance(found, BaseException)]


def bytes_asked(error: BaseException, observed: int | None = None) -> int | None:
    """Bytes that the failed allocation asked for, as far as anybody says.

    The CPU's allocator says what the tensor takes. CUDA's caching allocator says, in its message as to its observers,
    the segment it asked the driver for: what the tensor takes, but 2 MiB where that is up to 1 MiB, 20 MiB where it is
    below 10 MiB, else rounded up to a multiple of 2 MiB.

    Parameters
    ----------
    observed: int or None
        What the allocator last reported: the message's amount, but not rounded for a reader. Left out where it is of
        an earlier request, after which the run went on.
    """
    text = str(error)
    for pattern in (HOST_ASKED, *DEVICE_ASKED):
        if match := pattern.search(text):
            asked = round(float(match["amount"]) * UNITS[match["unit"]])
            return observed if observed is not None and abs(observed - asked) <= CLOSE * asked else asked
    return observed if isinstance(error, torch.OutOfMemoryError) else None


def watch_cuda_allocations() -> Callable[[], int | None]:
    """Have the CUDA allocator report failed requests to the byte, which its message rounds.

    Returns
    -------
    Callable
        Bytes of the last failed request, None before one, and always where the allocator in use reports none
        (``PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync``).
    """
    last: list[int] = []

    def observe(device: int, asked: int, device_total: int, device_free: int) -> None:
        last.append(asked)

    try:
        torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]
    except RuntimeError as error:
        print(f"out-of-memory rows will have no bytes: {error}", flush=True)
    return lambda: last[-1] if last else None
