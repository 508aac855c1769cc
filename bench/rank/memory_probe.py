"""Peaks of allocated memory, on CPU and CUDA.

CUDA's caching allocator keeps its own peaks. The CPU's allocator does not, but tells the profiler of every
allocation, so a run on the CPU spends its first steps under the profiler, from before the model exists: what is
allocated is then known to the byte. Timed steps are never profiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import RecordScope
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

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


# --- Make collectives let go of their tensors before they return, while memory is observed on a CPU.

PATCHED_COLLECTIVES = (
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "reduce",
    "broadcast",
)
"""Of `torch.distributed`, those the strategies call; some were renamed from one version of torch to the next."""

RELEASE_TIMEOUT_S = 5.0
"""How long a collective may take to let go before it is left at that: on a busy machine a thread of gloo can be."""

MIN_RELEASE_TIMEOUT_S = 0.02

GLOO_THREAD = "pt_gloo_runloop"
"""What torch calls a thread that carries out collectives of gloo."""


@dataclasses.dataclass
class _ReleaseState:
    """Whether collectives are watched, and how long each may take to let go.

    Who holds a tensor for as long as that is rather its caller, as DeepSpeed makes views of what is being gathered:
    after every such wait the next may take a quarter as long.
    """

    enabled: bool = True
    timeout_s: float = dataclasses.field(default_factory=lambda: RELEASE_TIMEOUT_S)


@contextlib.contextmanager
def wait_for_tensor_release() -> Iterator[None]:
    """Within, a collective is over only when no thread of the backend holds its tensors any longer.

    It is over when it returns or, if it runs beside its caller, when it was waited for. The profiler sees what the
    calling thread releases. Where a thread of gloo holds a tensor a moment longer than its owner, that thread releases
    it, unseen, and the tensor would count as allocated for ever.

    Operators have a kernel of ours meanwhile (`torch.library`). For functions of `torch.distributed` there is no such
    hook: they are replaced, and put back at the end. Backends other than gloo have no such threads.
    """
    if not dist.is_initialized() or dist.get_backend() != dist.Backend.GLOO:
        yield
        return
    release_state = _ReleaseState()  # switched off for those who keep what they find here, as DeepSpeed does
    originals = {name: getattr(dist, name) for name in PATCHED_COLLECTIVES if hasattr(dist, name)}
    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for name, collective in FUNCTIONAL_COLLECTIVES.items():
            library.impl(name, _wrap_functional_collective(collective, release_state), "CPU")
        try:
            for name, original in originals.items():
                setattr(dist, name, _wrap_collective(original, release_state))
            yield
        finally:
            release_state.enabled = False
            for name, original in originals.items():
                setattr(dist, name, original)


def wait_for_gloo_threads() -> None:
    """Wait until the threads of gloo have nothing left to do, once nobody waits for a collective any more.

    Those that DDP starts itself, in C++, are not among what `wait_for_tensor_release` sees. A thread that was
    interrupted right after one still holds its bucket, and would be the last to do so when the next step puts another
    one in its place.
    """
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    idle = 0
    while idle < 2 and time.monotonic() < deadline:  # twice: in between, one that waits for Python's lock has it
        idle = 0 if any(state != "S" for state in _gloo_thread_states()) else idle + 1
        time.sleep(0)


def _gloo_thread_states() -> Iterator[str]:
    for task in Path("/proc/self/task").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
            if name == GLOO_THREAD:
                yield rest.split()[0]


def _wrap_collective(collective: Callable[..., Any], release_state: _ReleaseState) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not release_state.enabled:
            return collective(*args, **kwargs)
        references = _TensorReferences(
            release_state, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        )
        work = collective(*args, **kwargs)
        if isinstance(work, dist.Work):
            return _ReleasingWork(work, references)
        references.wait_until_released()
        return work

    return call


class _TensorReferences:
    """Tensors of a collective, and how many hold them without its backend.

    They are held in C++, too, until the backend has let go of them. Where Python is left as the only holder of a
    tensor, whoever was the last one beside it gives up a reference of Python's (``intrusive_ptr`` in c10/util of torch
    2.13), for which a thread of gloo waits until it has Python's lock: it could then be the last of all, although
    nobody sees that it still holds the tensor.
    """

    def __init__(
        self, release_state: _ReleaseState, tensors: list[torch.Tensor], expected_counts: list[int] | None = None
    ) -> None:
        self._release_state = release_state
        self.tensors = tensors
        self._cpp_references = torch._C.ScriptList(tensors) if tensors else None
        self._expected_counts = expected_counts or [count_references(tensor) for tensor in tensors]

    def wait_until_released(self) -> None:
        """Wait until no more hold each of the tensors than before."""
        deadline = time.monotonic() + self._release_state.timeout_s
        while any(
            count_references(tensor) > count for tensor, count in zip(self.tensors, self._expected_counts, strict=True)
        ):
            if time.monotonic() > deadline:
                self._release_state.timeout_s = max(self._release_state.timeout_s / 4, MIN_RELEASE_TIMEOUT_S)
                break
            time.sleep(0)
        self._cpp_references = None


class _ReleasingWork(dist.Work):
    """Work under way which, once waited for, nobody but its caller holds the tensors of.

    As the work itself does, it keeps its tensors for as long as it is kept.
    """

    def __init__(self, work: dist.Work, references: _TensorReferences) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._references = references

    def wait(self, *args: Any) -> bool:
        if self._work is not None:
            self._work.wait(*args)
            self._work = None
            self._references.wait_until_released()
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def get_future(self) -> Any:
        if self._work is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            future.set_result(self._references.tensors)
            return future
        return self._work.get_future()


def _wrap_functional_collective(
    collective: Callable[..., Any], release_state: _ReleaseState
) -> Callable[..., torch.Tensor]:
    def call(*args: Any) -> torch.Tensor:
        input_references = _TensorReferences(
            release_state, [argument for argument in args if isinstance(argument, torch.Tensor)]
        )
        pending_result = collective(*args)
        result_references = _TensorReferences(release_state, [pending_result], [count_references(torch.empty(0)) + 1])
        result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(pending_result)
        input_references.wait_until_released()
        result_references.wait_until_released()
        return result

    return call


def _all_reduce(tensor: torch.Tensor, reduce_op: str, group: Any) -> torch.Tensor:
    output = tensor.clone(memory_format=torch.contiguous_format)
    return torch.ops._c10d_functional.all_reduce_(output, reduce_op, group)


def _all_gather(tensor: torch.Tensor, group_size: int, group: Any) -> torch.Tensor:
    out = tensor.new_empty((tensor.shape[0] * group_size, *tensor.shape[1:]))
    return torch.ops._c10d_functional.all_gather_into_tensor_out(tensor, group_size, group, out=out)


def _reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_size: int, group: Any) -> torch.Tensor:
    out = tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:]))
    return torch.ops._c10d_functional.reduce_scatter_tensor_out(tensor, reduce_op, group_size, group, out=out)


FUNCTIONAL_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
}
"""Of ``torch.ops._c10d_functional``, what DTensors call, which returns before it is done; and the same by its variant
that writes into a given tensor. (`torch.library.get_kernel` gives the operator's own kernel, but calls it with Python's
lock held, for which a thread of gloo waits that lets go of a tensor: both then wait for ever.)"""


def count_references(tensor: torch.Tensor) -> int:
    """How many hold the tensor or another one on its memory; Python's names for a tensor count as one."""
    return tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
