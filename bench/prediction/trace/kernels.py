"""What a device executes, one entry per kernel, as arrays: what the trace writes and the cost model reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MATMUL, ATTENTION, MEMORY_BOUND = range(3)
"""Kinds of kernels: matrix products, fused attention, and all that is bound by memory."""

OPERAND_FORMATS = ("fp32", "bf16", "fp16", "other", "fp8")
"""Formats of a kernel's operands; `other` for integers and booleans."""

ATTENTION_FORWARD_MATMULS, ATTENTION_BACKWARD_MATMULS = 2, 5
"""Matrix products over the square of scores in fused attention, whose backward computes the scores again (Dao et al.
2022, arXiv:2205.14135, algorithms 2 and 4). Causal attention leaves out the half that is masked."""

GROUPED_MATMUL_NAME_PART = "grouped_mm"
"""In the names of the operators that multiply the tokens of each expert with its weight."""

FALLBACK_NAME_PART = "fallback"
"""In those of them that multiply one expert after the other."""

GROUPED_DEPTH_SUFFIX = ".depth"
"""Behind such a name where the depth of the product is what experts share out, as in the gradients of their weights;
else it is the rows of the left operand."""

NUM_DIMS = 5

ALIGNED_ROW_BYTES = 16
"""What a thread loads at once: cuBLAS's fastest kernels are for matrices whose rows all begin at multiples of it
(https://docs.nvidia.com/cuda/cublas, section "Tensor Core Usage")."""

BIAS_SUFFIX = ".bias"
"""Behind the name of a fused attention operator that adds a bias or a mask to the scores."""

LEARNED_BIAS_SUFFIX = ".learned_bias"
"""The same where the bias has a gradient, as T5's of relative positions has."""

WIDE_BATCH = 1009
"""A batch whose traces tell what grows with it from what does not (`bench.prediction.trace.resized_trace`): a prime."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class KernelRecord(NamedTuple):
    """One kernel, as a trace notes it: what `KernelArrays` has of each."""

    operator: str
    kind: int
    format: int
    dims: tuple[int, ...]
    flops: int
    bytes_moved: int
    row_bytes: int = 0
    growing_bytes: int | None = None
    """In a trace of `WIDE_BATCH`: of the bytes moved those of tensors that have the batch as a factor, None where they
    are not known."""


@dataclass(frozen=True)
class KernelArrays:
    """Kernels in the order they start. All arrays have one entry per kernel."""

    operators: tuple[str, ...]
    """Name of the ATen operator: ``mm``, ``_fused_adamw``."""
    kinds: IntArray
    """MATMUL, ATTENTION or MEMORY."""
    formats: IntArray
    """Index into `OPERAND_FORMATS` of the widest floating-point operand."""
    dims: FloatArray
    """Shape (kernels, `NUM_DIMS`). MATMUL: batch, m, n, k, and 1 if the left operand is transposed, else 0. ATTENTION:
    batch, heads, queries, keys, head dimension. MEMORY: zeros."""
    flops: FloatArray
    """Of matrix products, a multiply-add counting 2; of fused attention what the kernel executes: forward 2 products
    over the scores, backward 5, half of each if causal."""
    bytes_moved: FloatArray
    """Bytes of operands read and results written, each once."""
    row_bytes: IntArray
    """Of matrix products: bytes that all rows of operands and result begin at multiples of, at most
    `ALIGNED_ROW_BYTES`; 0 where that is not known, and for other kernels."""

    def __len__(self) -> int:
        return len(self.operators)

    def slice_kernels(self, start: int, stop: int) -> KernelArrays:
        """Those from `start` up to, not including, `stop`."""
        selected = slice(start, stop)
        return KernelArrays(
            self.operators[selected],
            self.kinds[selected],
            self.formats[selected],
            self.dims[selected],
            self.flops[selected],
            self.bytes_moved[selected],
            self.row_bytes[selected],
        )


def concatenate_kernels(parts: Sequence[KernelArrays]) -> KernelArrays:
    """Several sequences of kernels as one."""
    return KernelArrays(
        operators=tuple(name for part in parts for name in part.operators),
        kinds=np.concatenate([part.kinds for part in parts]),
        formats=np.concatenate([part.formats for part in parts]),
        dims=np.concatenate([part.dims for part in parts]),
        flops=np.concatenate([part.flops for part in parts]),
        bytes_moved=np.concatenate([part.bytes_moved for part in parts]),
        row_bytes=np.concatenate([part.row_bytes for part in parts]),
    )


# --- What a trace cannot see in bitsandbytes' products with quantised matrices: one operator does several things.

MATMUL_4BIT, MATMUL_8BIT = "gemm_4bit", "int8_scaled_mm"

WORD_BYTES = 4
"""Of an fp32 or int32."""

MatmulShape = tuple[int, int, int, int, int]


def is_quantised_matmul(name: str) -> bool:
    """Whether an operator of this name is such a product."""
    return name in (MATMUL_4BIT, MATMUL_8BIT)


def compute_working_memory(name: str, args: tuple[Any, ...]) -> int:
    """Bytes it takes for a while."""
    if name == MATMUL_8BIT:
        return WORD_BYTES * math.prod(find_matmul_shape(name, args)[1:3])
    tokens, _, shape, _, block_size = args[:5]
    num_weights = math.prod(shape)
    return num_weights * tokens.element_size() + WORD_BYTES * math.ceil(num_weights / block_size)


def find_matmul_shape(name: str, args: tuple[Any, ...]) -> MatmulShape:
    """Batch, rows, columns and depth of the product, and that its right matrix is transposed."""
    tokens = args[0]
    outputs, inputs = args[1].shape if name == MATMUL_8BIT else args[2]
    return 1, tokens.numel() // inputs, outputs, inputs, 1


def find_query_block_size(queries: int) -> int:
    """Queries that the CPU's attention takes at once (``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``)."""
    return min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries)
