"""Records what fake tensors would do on a device: every allocation and release, every kernel.

Works on top of `FakeTensorMode`, where operators compute shapes and nothing else. A storage counts from the operator
that makes it until nothing holds it any longer, as in the allocator of a real run.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from bench.prediction.trace import kernels
from bench.prediction.trace.cpu_memory import InPlaceSumDetector, compute_working_memory
from bench.prediction.trace.kernel_calls import (
    count_distinct_bytes,
    count_growing_bytes,
    describe_kernel,
    is_kernel,
    iterate_tensors,
)
from bench.prediction.trace.kernels import KernelRecord
from bench.prediction.trace.trace import SEND
from bench.strategies.step_plan import TENSOR_GROUP

WRAPPER_TENSOR_TYPES = (DTensor, AsyncCollectiveTensor)
"""Tensors that stand for others: of all ranks, or still on the way."""

COLLECTIVE_BY_OPERATOR = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}
"""Functional collectives of torch (namespace ``_c10d_functional``), and what they are. Those that write into a buffer
are of compiled programs."""

WAITING_OPERATOR = "wait_for_exchange"
"""Of compiled programs: computes nothing, and waits for a collective that went on beside kernels."""

OnCollective = Callable[[str, int, str], Callable[[], None] | None]


class OpRecorder(TorchDispatchMode):
    """Calls back for every storage and every kernel.

    Parameters
    ----------
    on_memory_change: callable
        Takes the number of bytes of a storage (negative when it is released) and a number that names the storage.
    on_kernel: callable
        Takes a `KernelRecord`.
    on_collective: callable
        Takes the kind of a collective among ranks that share a layer, the bytes of the whole, and which group it is.
        Returns what is called when it is waited for, or None.
    on_cpu: bool
        Count the working memory of CPU kernels too.
    counts_growing_bytes: bool
        Of a batch of `WIDE_BATCH`: note which of the bytes that a kernel moves grow with it.
    """

    def __init__(
        self,
        on_memory_change: Callable[[int, int], None],
        on_kernel: Callable[[KernelRecord], None],
        on_collective: OnCollective = lambda kind, size, group: None,
        *,
        on_cpu: bool,
        counts_growing_bytes: bool = False,
    ) -> None:
        super().__init__()
        self._counts_growing_bytes = counts_growing_bytes
        self._on_memory_change = on_memory_change
        self._on_kernel = on_kernel
        self._on_collective = on_collective
        self._on_cpu = on_cpu
        self._sum_detector = InPlaceSumDetector()
        self._live_storages: dict[int, tuple[int, int]] = {}
        self._last_number = 0
        self._unwaited: dict[int, Callable[[], None]] = {}
        self.group_kinds: Mapping[str, str] = {}
        """Which group of a plan each process group is, by its name; those that share layers where it is not there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Its compiler never comes here: keeping it off every call would take as long as the call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on fake tensors, then note what it made."""
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if any(
            issubclass(tensor_type, WRAPPER_TENSOR_TYPES) or is_traceable_wrapper_subclass_type(tensor_type)
            for tensor_type in types
        ):
            return NotImplemented  # they, and torchao's tensors, come again as operators on what they consist of
        kwargs = kwargs or {}
        is_in_place_sum = self._sum_detector.is_in_place_sum(func, args, sys._getframe(1))
        out = func(*args, **kwargs)
        if is_in_place_sum:
            self._replace_storage(args[0], out)
        for tensor in iterate_tensors(out):
            self.track_storage(tensor)
        working_bytes = compute_working_memory(func, args, kwargs, out) if self._on_cpu else 0
        name = func._overloadpacket.__name__
        if kernels.is_quantised_matmul(name):
            working_bytes = kernels.compute_working_memory(name, args)
        if working_bytes:
            self._last_number += 1
            self._on_memory_change(working_bytes, self._last_number)
            self._on_memory_change(-working_bytes, self._last_number)
        if func.namespace == "_c10d_functional" and (kind := COLLECTIVE_BY_OPERATOR.get(func._opname)):
            if kind == "all-to-all" and sum(map(bool, args[2])) == 1:
                kind = SEND
            size = max(map(count_distinct_bytes, (*iterate_tensors(args), *iterate_tensors(out))))
            group_name = getattr(args[-1], "group_name", args[-1])
            note_wait = self._on_collective(kind, size, self.group_kinds.get(group_name, TENSOR_GROUP))
            if note_wait is not None:
                self._unwaited[out.untyped_storage()._cdata] = note_wait
        elif name == "wait_tensor":  # its result may be another tensor where tensors are fake
            note_wait = self._unwaited.pop(args[0].untyped_storage()._cdata, None)
            if note_wait is not None:
                self._unwaited[out.untyped_storage()._cdata] = note_wait
        elif name == WAITING_OPERATOR:
            self.note_wait(args[0])
        elif is_kernel(func):
            kernel = describe_kernel(func, args, kwargs, out)
            if self._counts_growing_bytes:
                kernel = kernel._replace(growing_bytes=count_growing_bytes(func, args, kwargs, out))
            self._on_kernel(kernel)
        return out

    def track_storage(self, tensor: torch.Tensor) -> None:
        """Note the tensor's storage, if it is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live_storages:
            self._last_number += 1
            size = storage.nbytes()
            self._live_storages[key] = size, self._last_number
            weakref.finalize(storage, self._note_free, key)
            self._on_memory_change(size, self._last_number)

    def note_wait(self, tensor: torch.Tensor) -> None:
        """The device computes nothing further until a collective's result is there."""
        note_wait = self._unwaited.pop(tensor.untyped_storage()._cdata, None)
        if note_wait is not None:
            note_wait()

    def find_storage_number(self, tensor: torch.Tensor) -> int:
        """What names the tensor's storage (of a tensor of several ranks, its part here), if it was tracked and has
        nothing else in it; else 0."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        size, number = self._live_storages.get(tensor.untyped_storage()._cdata, (0, 0))
        return number if size == tensor.nbytes else 0

    def _replace_storage(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """One storage takes another's place: in a real run they are the same."""
        key, storage = old.untyped_storage()._cdata, new.untyped_storage()
        self._live_storages[storage._cdata] = self._live_storages[key]
        self._live_storages[key] = 0, 0
        weakref.finalize(storage, self._note_free, storage._cdata)

    def close(self) -> None:
        """Take no further notice of anything."""
        self._on_memory_change = lambda size, number: None
        self._on_kernel = lambda kernel: None
        self._on_collective = lambda kind, size, group: None

    def _note_free(self, key: int) -> None:
        size, number = self._live_storages.pop(key)
        self._unwaited.pop(key, None)
        if size:
            self._on_memory_change(-size, number)
