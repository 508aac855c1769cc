"""Make collectives let go of their tensors before they return, while memory is observed on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from bench.models.float8 import all_gather_as_bytes

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


def _reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_size: int, group: Any) -> torch.Tensor:
    out = tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:]))
    return torch.ops._c10d_functional.reduce_scatter_tensor_out(tensor, reduce_op, group_size, group, out=out)


def _all_to_all(tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], group: Any) -> torch.Tensor:
    out = tensor.new_empty((sum(output_splits), *tensor.shape[1:]))
    group = group if isinstance(group, dist.ProcessGroup) else distributed_c10d._resolve_process_group(group)
    dist.all_to_all_single(out, tensor, output_splits, input_splits, group)
    return out


FUNCTIONAL_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": all_gather_as_bytes,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}
"""Of ``torch.ops._c10d_functional``, what DTensors, context and expert parallelism call, which returns before it is
done; and the same by an operator that writes into a given tensor. (`torch.library.get_kernel` gives the operator's own
kernel, but calls it with Python's lock held, for which a thread of gloo waits that lets go of a tensor: both then wait
for ever.)"""


def count_references(tensor: torch.Tensor) -> int:
    """How many hold the tensor or another one on its memory; Python's names for a tensor count as one."""
    return tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
