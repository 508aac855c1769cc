"""Peaks of allocated memory, on CPU and CUDA.

CUDA's caching allocator keeps its own peaks. The CPU's allocator does not, but tells the profiler of every
allocation, so a run on the CPU spends its first steps under the profiler, from before the model exists: what is
allocated is then known to the byte. Timed steps are never profiled.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile

from bench.rank.tensor_release import wait_for_tensor_release

UnmeasuredWork = Callable[[], contextlib.AbstractContextManager[None]]

OPERATOR_SCOPES = {RecordScope.FUNCTION, RecordScope.BACKWARD_FUNCTION}

MATMUL_OPERATORS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
"""Operators that leave it to a library to multiply matrices."""


@dataclass(frozen=True)
class MemoryPeaks:
    """Peaks of one rank in bytes."""

    allocated: int
    """In a step after warm-up."""
    active: int
    reserved: int
    allocated_overall: int
    """Over construction and warm-up too."""
    device_used: int | None
    """What the driver sees in use after the steps (CPU: peak resident size of the process)."""
    alloc_retries: int
    """Flushes of the caching allocator during the timed steps."""


class MemoryProbe(ABC):
    """Follows a rank's memory from before the model is built to after the timed steps."""

    observed_steps: int
    """Steps after construction that must run under `observe` at least; the last of them counts as steady, or the last
    period of a strategy whose steps are not alike."""

    @abstractmethod
    def observe(self) -> contextlib.AbstractContextManager[None]:
        """Around construction and the first `observed_steps` steps."""

    def start_steady_step(self) -> None:
        """Right before the last of the observed steps, or the last period."""

    @abstractmethod
    def start_timed_steps(self) -> None:
        """Right before the timed steps."""

    @abstractmethod
    def read_peaks(self) -> MemoryPeaks:
        """After the timed steps."""


class CudaMemoryProbe(MemoryProbe):
    """Reads the caching allocator's own peaks, reset after warm-up: of several devices the largest."""

    observed_steps = 0

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._peak_before_timing = 0
        self._retries_before = 0

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        yield

    def start_timed_steps(self) -> None:
        """Remember the peak so far and reset it."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._peak_before_timing = self._read_largest("allocated_bytes.all.peak")
        self._retries_before = self._count_retries()
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def read_peaks(self) -> MemoryPeaks:
        allocated = self._read_largest("allocated_bytes.all.peak")
        return MemoryPeaks(
            allocated=allocated,
            active=self._read_largest("active_bytes.all.peak"),
            reserved=self._read_largest("reserved_bytes.all.peak"),
            allocated_overall=max(allocated, self._peak_before_timing),
            device_used=max(total - free for free, total in map(torch.cuda.mem_get_info, self._devices)),
            alloc_retries=self._count_retries() - self._retries_before,
        )

    def _read_largest(self, stat_name: str) -> int:
        return max(int(torch.cuda.memory_stats(device)[stat_name]) for device in self._devices)

    def _count_retries(self) -> int:
        return sum(int(torch.cuda.memory_stats(device)["num_alloc_retries"]) for device in self._devices)


@dataclass(frozen=True)
class MemoryChange:
    """One allocation (positive size) or release (negative) on the CPU."""

    time_ns: int
    address: int
    size: int
    by_backend: bool
    """By a library: within a collective, or by a thread of the communication library, a buffer of its own, which its
    threads release unseen; or within a product of matrices."""


class CpuMemoryProbe(MemoryProbe):
    """Adds up the allocations the profiler reports.

    The CPU allocator caches nothing: what is allocated is active and is all that is held. Buffers that gloo
    allocates within a collective are left out, as NCCL's lie outside of what CUDA's allocator counts; and what oneDNN
    takes of the allocator while it multiplies matrices in 16 bits, which is another with every processor's instructions
    and none of which is seen where MKL multiplies those in fp32.
    """

    observed_steps = 2  # optimizer state first appears in step 1, so step 2 is the first like all others

    def __init__(self, unmeasured_work: UnmeasuredWork) -> None:
        self._unmeasured_work = unmeasured_work
        self._steady_peak = 0
        self._overall_peak = 0
        self._steady_from_ns = 0

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Under the profiler, which keeps running if what is observed fails: the process is over then."""
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _profile_operators_only():
            profiler.start()
        with wait_for_tensor_release():
            yield
        # Not after a failure: if memory ran out within the profiler's own bookkeeping, stopping it may crash.
        with self._unmeasured_work():
            profiler.stop()
            self._read_profile(profiler)

    def _read_profile(self, profiler: profile) -> None:
        assert profiler.profiler is not None
        assert profiler.profiler.kineto_results is not None
        changes: list[MemoryChange] = []
        roots: list[Any] = profiler.profiler.kineto_results.experimental_event_tree()
        main_thread = min(roots, key=lambda event: event.start_time_ns).start_tid
        pending = [(event, False) for event in roots]
        while pending:
            event, in_backend = pending.pop()
            name = event.name
            in_backend = in_backend or name.startswith("c10d::") or event.start_tid != main_thread
            if name == "[memory]":
                allocation: Any = event.extra_fields
                changes.append(MemoryChange(event.start_time_ns, allocation.ptr, allocation.alloc_size, in_backend))
            matmul_temporaries = _find_matmul_temporaries(event) if name in MATMUL_OPERATORS else set()
            pending.extend((child, in_backend or child.id in matmul_temporaries) for child in event.children)
        self._overall_peak, self._steady_peak = compute_memory_peaks(changes, self._steady_from_ns)

    def start_steady_step(self) -> None:
        """Remember when, by the clock of the profiler's events."""
        self._steady_from_ns = time.time_ns()

    def start_timed_steps(self) -> None:
        """Nothing to reset: the steady step was observed before."""

    def read_peaks(self) -> MemoryPeaks:
        """Peaks of the observed steps."""
        return MemoryPeaks(
            allocated=self._steady_peak,
            active=self._steady_peak,
            reserved=self._steady_peak,
            allocated_overall=self._overall_peak,
            device_used=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            alloc_retries=0,
        )


@contextlib.contextmanager
def _profile_operators_only() -> Iterator[None]:
    """Have a profiler that is started within follow operators, and nothing that is only named.

    Collectives are named, and their end is noted by a thread of gloo, sometimes after the caller, who does not wait
    for that, went on. It would write into the profiler's memory when that is long given back, and the process crashes.
    """
    enable_profiler = autograd_profiler._enable_profiler
    autograd_profiler._enable_profiler = functools.partial(enable_profiler, scopes=OPERATOR_SCOPES)  # type: ignore[call-arg]
    try:
        yield
    finally:
        autograd_profiler._enable_profiler = enable_profiler


def _find_matmul_temporaries(matmul_event: Any) -> set[int]:
    """Allocations that a product makes itself, in no operator within it, and releases before it is over: it needs none
    but its result's, which is there afterwards, so that these are the library's."""
    live_event_ids: dict[int, int] = {}
    temporary_ids: set[int] = set()
    for event in sorted(matmul_event.children, key=lambda event: event.start_time_ns):
        if event.name == "[memory]":
            allocation = event.extra_fields
            if allocation.alloc_size > 0:
                live_event_ids[allocation.ptr] = event.id
            elif allocation.ptr in live_event_ids:
                temporary_ids.add(live_event_ids.pop(allocation.ptr))
    return temporary_ids


def compute_memory_peaks(changes: Iterable[MemoryChange], steady_from_ns: int) -> tuple[int, int]:
    """Peaks of the memory of a run's own tensors.

    Parameters
    ----------
    changes: iterable of Change
        In any order.
    steady_from_ns: int
        When the steady step starts.

    Returns
    -------
    overall, steady: int
        Peak in bytes over all changes, and from `steady_from_ns` on (counting what is allocated by then).
    """
    live_sizes: dict[int, int] = {}
    current = overall_peak = steady_peak = 0
    is_steady = False
    for change in sorted(changes, key=lambda change: change.time_ns):
        if not is_steady and change.time_ns >= steady_from_ns:
            is_steady, steady_peak = True, current
        # An address given out again was released in between, if unseen.
        current -= live_sizes.pop(change.address, 0)
        if change.size > 0 and not change.by_backend:
            live_sizes[change.address] = change.size
            current += change.size
        overall_peak = max(overall_peak, current)
        steady_peak = max(steady_peak, current) if is_steady else 0
    return overall_peak, steady_peak


def build_memory_probe(devices: Sequence[torch.device], unmeasured_work: UnmeasuredWork) -> MemoryProbe:
    """The probe for a rank's devices.

    `unmeasured_work` gives a context for what the probe itself needs memory for, which is not the run's.
    """
    return CudaMemoryProbe(devices) if devices[0].type == "cuda" else CpuMemoryProbe(unmeasured_work)
