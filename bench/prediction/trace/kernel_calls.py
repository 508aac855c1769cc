"""The kernel of an operator's call: what it multiplies, attends to or moves, told from the call's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from bench.models.float8 import SIZE_MULTIPLE
from bench.prediction.trace import kernels
from bench.prediction.trace.device_operators import FAKE_NAMESPACE
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

FORMAT_BY_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
OTHER_FORMAT, FP8_FORMAT = OPERAND_FORMATS.index("other"), OPERAND_FORMATS.index("fp8")

FP8_MATMUL = "_scaled_mm"
"""The operator that multiplies matrices in FP8."""

LINEAR_MATMULS = ("mm", "addmm")
"""Operators of linear layers, forward and backward."""

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

ATTENTION_NAME_PART = "attention"
"""What the names of fused attention operators have in common."""


EMBEDDING_BAG, INDEX_ADD, INDEX = "_embedding_bag", "index_add_", "index"
"""Operators that read or update the rows of a tensor that an index names: the beginning of several names, and two."""


def describe_kernel(func: Any, args: Any, kwargs: Any, out: Any) -> KernelRecord:
    """The kernel of one call."""
    name = func._schema.name.partition("::")[2]
    operands = list(iterate_tensors((args, {key: value for key, value in kwargs.items() if key != "out"})))
    results = list(iterate_tensors(out))
    bytes_moved = sum(map(count_distinct_bytes, operands)) + sum(map(count_distinct_bytes, results))
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


def count_growing_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Of the bytes that a call in a trace of `WIDE_BATCH` moves, those of tensors that have the batch as a factor; None
    of calls that name some rows of a tensor, unless rows and tensor both have it, or neither."""
    name = func._schema.name.partition("::")[2]
    operands = list(iterate_tensors((args, {key: value for key, value in kwargs.items() if key != "out"})))
    results = list(iterate_tensors(out))
    growing_bytes = sum(size for size in map(count_distinct_bytes, (*operands, *results)) if _grows(size))
    if name.startswith(EMBEDDING_BAG) or name == INDEX_ADD:
        return None
    if name == INDEX:
        if _grows(operands[0].nbytes) != _grows(results[0].nbytes):
            return None
        if _grows(results[0].nbytes):
            growing_bytes -= _count_unnamed_row_bytes(name, operands, results)
    return growing_bytes


def _grows(size: int) -> bool:
    return size % kernels.WIDE_BATCH == 0


def round_operands(kernel: KernelRecord) -> KernelRecord:
    """The same product with operands in FP8, of a linear layer or of experts whose sizes are such that FP8 takes them;
    any other kernel as it is."""
    if GROUPED_MATMUL_NAME_PART in kernel.operator:
        operator = kernel.operator
    elif kernel.operator in LINEAR_MATMULS and not any(size % SIZE_MULTIPLE for size in kernel.dims[1:4]):
        operator = FP8_MATMUL
    else:
        return kernel
    batch, m, n, k, _ = kernel.dims
    bytes_moved = batch * (m * k + k * n + torch.bfloat16.itemsize * m * n)
    return KernelRecord(operator, MATMUL, FP8_FORMAT, kernel.dims, kernel.flops, bytes_moved, kernels.ALIGNED_ROW_BYTES)


def _count_unnamed_row_bytes(name: str, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> int:
    """Of operators that read or update the rows of a tensor that an index names: bytes of all others, as often as the
    tensor is counted."""
    if name.startswith(EMBEDDING_BAG):
        table, index = operands[:2]
        return max(0, table.nbytes - index.numel() * table.shape[1] * table.element_size())
    if name == INDEX_ADD:
        target, _, source = operands[:3]
        return 2 * max(0, target.nbytes - source.numel() * target.element_size())
    if name == INDEX:
        return max(0, count_distinct_bytes(operands[0]) - results[0].nbytes)
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


def count_distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements a tensor really has in memory: an expanded dimension counts once."""
    num_bytes = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            num_bytes *= size
    return num_bytes


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iterate_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iterate_tensors(item)
