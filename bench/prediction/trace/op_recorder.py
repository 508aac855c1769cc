"""Records what fake tensors would do on a device: every allocation and release, every kernel.

Works on top of `FakeTensorMode`, where operators compute shapes and nothing else. A storage counts from the operator
that makes it until nothing holds it any longer, as in the allocator of a real run.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from bench.finetune import stand_ins
from bench.prediction.trace import kernels
from bench.prediction.trace.cpu_memory import InPlaceSumDetector, compute_working_memory
from bench.prediction.trace.kernels import (
    ATTENTION,
    ATTENTION_BACKWARD_MATMULS,
    ATTENTION_FORWARD_MATMULS,
    BIAS_SUFFIX,
    GROUPED_DEPTH_SUFFIX,
    GROUPED_MATMUL_NAME_PART,
    LEARNED_BIAS_SUFFIX,
    MATMUL,
    MEMORY_BOUND,
    OPERAND_FORMATS,
    KernelRecord,
)
from bench.strategies.step_plan import TENSOR_GROUP

WRAPPER_TENSOR_TYPES = (DTensor, AsyncCollectiveTensor)
"""Tensors that stand for others: of all ranks, or still on the way."""

FORMAT_BY_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OTHER_FORMAT, FP8_FORMAT = OPERAND_FORMATS.index("other"), OPERAND_FORMATS.index("fp8")

FP8_MATMUL = "_scaled_mm"
"""The operator that multiplies matrices in FP8."""

OPERATORS_WITHOUT_KERNEL = {
    "detach",
    "_unsafe_view",
    "alias",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "wait_tensor",
}
"""Operators that start no kernel, though their schema does not say that they are views."""

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

SEND = "send"
"""What an all-to-all is in which each rank sends everything to one other rank."""

FAKE_NAMESPACE = "bench"
"""Of the operators that stand for those of CUDA devices."""

ATTENTION_NAME_PART = "attention"
"""What the names of fused attention operators have in common."""


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
    """

    def __init__(
        self,
        on_memory_change: Callable[[int, int], None],
        on_kernel: Callable[[KernelRecord], None],
        on_collective: OnCollective = lambda kind, size, group: None,
        *,
        on_cpu: bool,
    ) -> None:
        super().__init__()
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
        for tensor in _iterate_tensors(out):
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
            size = max(map(_count_distinct_bytes, (*_iterate_tensors(args), *_iterate_tensors(out))))
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
            self._on_kernel(describe_kernel(func, args, kwargs, out))
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


def describe_kernel(func: Any, args: Any, kwargs: Any, out: Any) -> KernelRecord:
    """The kernel of one call."""
    name = func._schema.name.partition("::")[2]
    operands = list(_iterate_tensors((args, {key: value for key, value in kwargs.items() if key != "out"})))
    results = list(_iterate_tensors(out))
    bytes_moved = sum(map(_count_distinct_bytes, operands)) + sum(map(_count_distinct_bytes, results))
    bytes_moved -= _count_unnamed_row_bytes(name, operands, results)
    format_ = min((FORMAT_BY_DTYPE.get(tensor.dtype, OTHER_FORMAT) for tensor in operands), default=OTHER_FORMAT)
    if kernels.is_quantised_matmul(name):
        shape: tuple[int, ...] = kernels.find_matmul_shape(name, args)
        working_bytes = kernels.compute_working_memory(name, args)
        format_ = FORMAT_BY_DTYPE.get(out.dtype, OTHER_FORMAT)
        flops = 2 * math.prod(shape[:4])
        return KernelRecord(name, MATMUL, format_, shape, flops, bytes_moved + 2 * working_bytes)
    if ATTENTION_NAME_PART in name:
        is_backward = "backward" in name
        query, key = operands[1:3] if is_backward else operands[:2]
        has_bias = func.namespace == FAKE_NAMESPACE and len(operands) > (6 if is_backward else 3)
        if has_bias:
            name += LEARNED_BIAS_SUFFIX if _find_switch("learns_bias", func, args, kwargs) else BIAS_SUFFIX
        attention_shape = (*query.shape[:3], key.shape[2], query.shape[3])
        num_matmuls = ATTENTION_BACKWARD_MATMULS if is_backward else ATTENTION_FORWARD_MATMULS
        flops = 2 * num_matmuls * math.prod(attention_shape) // (2 if _is_causal(func, args, kwargs) else 1)
        return KernelRecord(name, ATTENTION, format_, attention_shape, flops, bytes_moved)
    if GROUPED_MATMUL_NAME_PART in name:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        if operands[1].dim() == 2:
            name += GROUPED_DEPTH_SUFFIX
        shape = _find_grouped_matmul_shape(operands, flops)
        return KernelRecord(name, MATMUL, format_, shape, int(flops), bytes_moved)
    if func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        left, right = (
            operands[:2] if name == FP8_MATMUL else operands[-2:]
        )  # followed by scales; an addmm begins with bias
        format_ = FP8_FORMAT if name == FP8_MATMUL else format_
        batch = left.shape[0] if left.dim() == 3 else 1
        row_bytes = min(map(_find_row_alignment, (left, right, *results)))
        shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1], int(_is_transposed(left)))
        return KernelRecord(name, MATMUL, format_, shape, int(flops), bytes_moved, row_bytes)
    return KernelRecord(name, MEMORY_BOUND, format_, (), 0, bytes_moved)


def _count_unnamed_row_bytes(name: str, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> int:
    """Of operators that read or update the rows of a tensor that an index names: bytes of all others, as often as the
    tensor is counted."""
    if name.startswith("_embedding_bag"):
        table, index = operands[:2]
        return max(0, table.nbytes - index.numel() * table.shape[1] * table.element_size())
    if name == "index_add_":
        target, _, source = operands[:3]
        return 2 * max(0, target.nbytes - source.numel() * target.element_size())
    if name == "index":
        return max(0, _count_distinct_bytes(operands[0]) - results[0].nbytes)
    return 0


def _find_grouped_matmul_shape(operands: Sequence[torch.Tensor], flops: int) -> tuple[int, ...]:
    """As that of a batch of as many products as there are groups, all of one size; forward and backward in one
    operator count as twice as many."""
    left, right, ends = operands[:3]
    groups, columns = ends.shape[0], right.shape[-1]
    rows, depth = left.shape
    if right.dim() == 2:  # cut along the depth
        return groups, rows, columns, max(1, depth // groups), int(_is_transposed(left))
    num_products = flops // (2 * rows * columns * depth)
    return num_products * groups, max(1, rows // groups), columns, depth, 0


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an attention operator is called to leave out the pairs above the diagonal."""
    return _find_switch("is_causal", func, args, kwargs)


def _find_switch(name: str, func: Any, args: Any, kwargs: Any) -> bool:
    """What an operator is called with for an argument that is true or false; False where it has none of that name."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return bool(args[index] if index < len(args) else kwargs.get(name, argument.default_value))
    return False


def _is_transposed(matrix: torch.Tensor) -> bool:
    """Whether neighbours in memory are one below the other."""
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1


def _find_row_alignment(matrices: torch.Tensor) -> int:
    """Bytes that all rows, or all columns where those are what lies together, begin at multiples of, as far as 16."""
    strides = [stride for size, stride in zip(matrices.shape, matrices.stride(), strict=True) if size > 1 < stride]
    return math.gcd(kernels.ALIGNED_ROW_BYTES, *(stride * matrices.element_size() for stride in strides))


def is_kernel(func: Any) -> bool:
    """Whether an operator computes something, not only looks at memory in another way."""
    return not func.is_view and func._schema.name.partition("::")[2] not in OPERATORS_WITHOUT_KERNEL


def _count_distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements a tensor really has in memory: an expanded dimension counts once."""
    num_bytes = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            num_bytes *= size
    return num_bytes


def _iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _iterate_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _iterate_tensors(item)


# --- Operators that CUDA devices have and CPUs lack, for traces made where there is no such device.

# What they are called and what they return is all there is of these operators: fake tensors need no more.
torch.library.define(
    "bench::attention_forward",
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, bool is_causal, bool learns_bias=False)"
    " -> (Tensor output, Tensor log_sum_exp)",
)
torch.library.define(
    "bench::attention_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor output, Tensor log_sum_exp,"
    " bool is_causal, bool learns_bias=False) -> (Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("bench::attention_forward")
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    learns_bias: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the query's shape (batch, heads, queries, head dimension), and the log-sum-exp of every row."""
    batch, heads, queries, _ = query.shape
    # In memory heads come after positions, so that putting them side by side again copies nothing.
    output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
    return output, query.new_empty(batch, heads, queries, dtype=torch.float32)


@torch.library.register_fake("bench::attention_backward")
def _(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    """Gradients of query, key and value."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def run_attention_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    output: Any,
    log_sum_exp: Any,
    is_causal: bool,
    learns_bias: bool = False,
) -> Any:
    """Gradients of query, key and value; its buffers are there while it runs."""
    buffers = [
        torch.empty_like(query, dtype=torch.float32),  # both kernels add up the query's gradient in fp32
        torch.empty_like(log_sum_exp),
    ]
    gradients = torch.ops.bench.attention_backward(
        gradient, query, key, value, bias, output, log_sum_exp, is_causal, learns_bias
    )
    del buffers
    return gradients


class _FakeFusedAttention(torch.autograd.Function):
    """What a fused kernel keeps from forward to backward, and what backward needs for a while."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, bias: Any, is_causal: bool, learns_bias: bool
    ) -> torch.Tensor:
        output, log_sum_exp = torch.ops.bench.attention_forward(query, key, value, bias, is_causal, learns_bias)
        ctx.save_for_backward(query, key, value, bias, output, log_sum_exp)
        ctx.causal, ctx.learns_bias = is_causal, learns_bias
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        query, key, value, bias, output, log_sum_exp = ctx.saved_tensors
        needs_bias_gradient = bias is not None and ctx.needs_input_grad[3]
        scores = query.new_empty(*query.shape[:3], key.shape[2]) if needs_bias_gradient else None
        gradients = run_attention_backward(
            gradient, query, key, value, bias, output, log_sum_exp, ctx.causal, ctx.learns_bias
        )
        bias_gradient = None if scores is None else scores.sum_to_size(bias.shape)
        return (*gradients, bias_gradient, None, None)


def _run_fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    learns_bias = attn_mask is not None and attn_mask.requires_grad
    return _FakeFusedAttention.apply(query, key, value, attn_mask, is_causal, learns_bias)


def _run_fused_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """As `torch.nn.functional.dropout`."""
    return torch.native_dropout(input, p, training)[0] if p and training else input


def _run_int8_matmul(
    tokens: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, state: Any = None
) -> Any:
    """As `bitsandbytes.matmul` on a GPU."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    return MatMul8bitLt.apply(tokens, weight, None, bias, state)


@contextlib.contextmanager
def use_device_operators(device: str) -> Iterator[None]:
    """Within, attention and dropout allocate and compute as on `device`: cpu leaves them alone."""
    original_attention, original_dropout = functional.scaled_dot_product_attention, functional.dropout
    original_int8_product = stand_ins.multiply_int8
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    original_matmul = bitsandbytes and bitsandbytes.matmul
    if device == "cuda":
        functional.scaled_dot_product_attention, functional.dropout = _run_fused_attention, _run_fused_dropout
        stand_ins.multiply_int8 = stand_ins.multiply_int8_on_gpu
        if bitsandbytes:
            bitsandbytes.matmul = _run_int8_matmul
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = original_attention, original_dropout
        stand_ins.multiply_int8 = original_int8_product
        if bitsandbytes:
            bitsandbytes.matmul = original_matmul
