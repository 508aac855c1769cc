"""Records what fake tensors would do on a device: every allocation and release, every kernel.

Works on top of `FakeTensorMode`, where operators compute shapes and nothing else. A storage counts from the operator
that makes it until nothing holds it any longer, as in the allocator of a real run.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from bench.simulate import quantised_products
from bench.simulate.cpu_memory import Sums, working_memory
from bench.simulate.kernels import ATTENTION, BACKWARD_PRODUCTS, FORMATS, FORWARD_PRODUCTS, MATMUL, MEMORY

DIVIDED = (DTensor, AsyncCollectiveTensor)
"""Tensors that stand for others: of all ranks, or still on the way."""

FORMAT_OF = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OTHER, FP8 = FORMATS.index("other"), FORMATS.index("fp8")

IN_FP8 = "_scaled_mm"
"""The operator that multiplies matrices in FP8."""

NO_KERNEL = {"detach", "_unsafe_view", "alias", "empty", "empty_like", "empty_strided", "lift_fresh", "wait_tensor"}
"""Operators that start no kernel, though their schema does not say that they are views."""

COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
}
"""Functional collectives of torch (namespace ``_c10d_functional``), and what they are."""

ATTENTIONS = "attention"
"""What the names of fused attention operators have in common."""


Kernel = tuple[str, int, int, tuple[int, ...], int, int]
"""Operator name, kind, format, dimensions, FLOPs and bytes moved."""

Uses = tuple[tuple[int, int], ...]
"""Storages a kernel reads or writes: number and bytes."""


class Recorder(TorchDispatchMode):
    """Calls back for every storage and every kernel.

    Parameters
    ----------
    changed: callable
        Takes the number of bytes of a storage (negative when it is released) and a number that names the storage.
    launched: callable
        Takes a `Kernel`, the storages it reads and those it writes.
    sent: callable
        Takes the kind of a collective among ranks that share a layer and the bytes of the whole.
    on_cpu: bool
        Count the working memory of CPU kernels too.
    """

    def __init__(
        self,
        changed: Callable[[int, int], None],
        launched: Callable[[Kernel, Uses, Uses], None],
        sent: Callable[[str, int], None] = lambda kind, size: None,
        *,
        on_cpu: bool,
    ) -> None:
        super().__init__()
        self._changed = changed
        self._launched = launched
        self._sent = sent
        self._on_cpu = on_cpu
        self._sums = Sums()
        self._live: dict[int, tuple[int, int]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on fake tensors, then note what it made."""
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if any(issubclass(each, DIVIDED) or is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # they, and torchao's tensors, come again as operators on what they consist of
        kwargs = kwargs or {}
        in_place = self._sums.in_place(func, args, sys._getframe(1))
        out = func(*args, **kwargs)
        if in_place:
            self._continue(args[0], out)
        for tensor in _tensors(out):
            self.track(tensor)
        size = working_memory(func, args, kwargs, out) if self._on_cpu else 0
        name = func._overloadpacket.__name__
        if quantised_products.is_product(name):
            size = quantised_products.working_memory(name, args)
        if size:
            self._count += 1
            self._changed(size, self._count)
            self._changed(-size, self._count)
        if func.namespace == "_c10d_functional" and (kind := COLLECTIVES.get(func._opname)):
            self._sent(kind, max(map(_distinct_bytes, (*_tensors(args), *_tensors(out)))))
        elif is_kernel(func):
            self._launched(describe(func, args, kwargs, out), self._uses((args, kwargs)), self._uses(out))
        return out

    def track(self, tensor: torch.Tensor) -> None:
        """Note the tensor's storage, if it is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._count += 1
            size = storage.nbytes()
            self._live[key] = size, self._count
            weakref.finalize(storage, self._release, key)
            self._changed(size, self._count)

    def number_of(self, tensor: torch.Tensor) -> int:
        """What names the tensor's storage (of a tensor of several ranks, its part here), if it was tracked and has
        nothing else in it; else 0."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        size, number = self._live.get(tensor.untyped_storage()._cdata, (0, 0))
        return number if size == tensor.nbytes else 0

    def _uses(self, value: Any) -> Uses:
        """Of tensors whose storages were tracked: number and bytes."""
        found = ((tensor.untyped_storage()._cdata, tensor) for tensor in _tensors(value))
        return tuple((self._live[key][1], _distinct_bytes(tensor)) for key, tensor in found if key in self._live)

    def _continue(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """One storage takes another's place: in a real run they are the same."""
        key, storage = old.untyped_storage()._cdata, new.untyped_storage()
        self._live[storage._cdata] = self._live[key]
        self._live[key] = 0, 0
        weakref.finalize(storage, self._release, storage._cdata)

    def close(self) -> None:
        """Take no further notice of anything."""
        self._changed = lambda size, number: None
        self._launched = lambda kernel, reads, writes: None
        self._sent = lambda kind, size: None

    def _release(self, key: int) -> None:
        size, number = self._live.pop(key)
        if size:
            self._changed(-size, number)


def describe(func: Any, args: Any, kwargs: Any, out: Any) -> Kernel:
    """Operator name, kind, format, dimensions, FLOPs and bytes moved of one call."""
    name = func._schema.name.partition("::")[2]
    operands = list(_tensors((args, kwargs)))
    results = list(_tensors(out))
    moved = sum(map(_distinct_bytes, operands)) + sum(map(_distinct_bytes, results))
    format_ = min((FORMAT_OF.get(tensor.dtype, OTHER) for tensor in operands), default=OTHER)
    if quantised_products.is_product(name):
        shape = quantised_products.dimensions(name, args)
        written = quantised_products.working_memory(name, args)
        format_ = FORMAT_OF.get(out.dtype, OTHER)
        return name, MATMUL, format_, shape, 2 * math.prod(shape[:4]), moved + 2 * written
    if ATTENTIONS in name:
        query, key = operands[1:3] if "backward" in name else operands[:2]
        dimensions = (*query.shape[:3], key.shape[2], query.shape[3])
        products = BACKWARD_PRODUCTS if "backward" in name else FORWARD_PRODUCTS
        flops = 2 * products * math.prod(dimensions) // (2 if _is_causal(func, args, kwargs) else 1)
        return name, ATTENTION, format_, dimensions, flops, moved
    if func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        left, right = operands[:2] if name == IN_FP8 else operands[-2:]  # followed by scales; an addmm begins with bias
        format_ = FP8 if name == IN_FP8 else format_
        batch = left.shape[0] if left.dim() == 3 else 1
        shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1], int(_is_transposed(left)))
        return name, MATMUL, format_, shape, int(flops), moved
    return name, MEMORY, format_, (0, 0, 0, 0, 0), 0, moved


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an attention operator is called to leave out the pairs above the diagonal."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[index] if index < len(args) else kwargs.get("is_causal", argument.default_value))
    return False


def _is_transposed(matrix: torch.Tensor) -> bool:
    """Whether neighbours in memory are one below the other."""
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1


def is_kernel(func: Any) -> bool:
    """Whether an operator computes something, not only looks at memory in another way."""
    return not func.is_view and func._schema.name.partition("::")[2] not in NO_KERNEL


def _distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements a tensor really has in memory: an expanded dimension counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
    return count


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
