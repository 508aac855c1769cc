"""How long operators take on a processor that computes by itself: everything adds up, nothing runs beside it."""

from __future__ import annotations

import numpy as np

from bench.core.precision import Precision, get_torch_dtype
from bench.hardware import Hardware
from bench.hardware.speeds import ProcessorSpeed
from bench.prediction.trace.cpu_memory import find_query_block_size
from bench.prediction.trace.kernels import (
    ATTENTION,
    ATTENTION_BACKWARD_MATMULS,
    ATTENTION_FORWARD_MATMULS,
    MATMUL,
    OPERAND_FORMATS,
    FloatArray,
    KernelArrays,
)

ATTENTION_KEYS_PER_BLOCK = 512
"""Keys that the CPU's attention takes at once (``kvSplitSize`` in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
Causal attention leaves out blocks that are masked altogether, not parts of one."""


def compute_cpu_arithmetic_seconds(kernels: KernelArrays, hardware: Hardware, precision: Precision) -> FloatArray:
    """Seconds of arithmetic per operator, without what every operator takes; 0 for those bound by memory.

    Matrix products include their operands' bytes.

    Raises
    ------
    ValueError
        If a format was not measured.
    """
    assert hardware.speeds is not None
    assert hardware.speeds.processor is not None
    processor = hardware.speeds.processor
    seconds = np.zeros(len(kernels))
    for format_index, format_name in enumerate(OPERAND_FORMATS):
        selected = (kernels.kinds == MATMUL) & (kernels.formats == format_index)
        if np.any(selected):
            format_ = "fp32" if format_name == "other" else format_name
            _require_format(format_, hardware, processor)
            seconds[selected] = compute_cpu_matmul_seconds(
                kernels.dims[selected], kernels.flops[selected], format_, processor
            )
    selected = kernels.kinds == ATTENTION
    if np.any(selected):
        _require_format(precision.compute, hardware, processor)
        is_backward = np.array(["backward" in operator for operator in kernels.operators])[selected]
        seconds[selected] = compute_cpu_attention_seconds(
            kernels.dims[selected], kernels.flops[selected], is_backward, precision.compute, processor
        )
    return seconds


def compute_cpu_matmul_seconds(
    dims: FloatArray, flops: FloatArray, format_: str, processor: ProcessorSpeed
) -> FloatArray:
    """Seconds of matrix products of one format, for shapes (batch, m, n, k, 1 if the left operand is transposed)."""
    matmul_speed = processor.products
    gflops = np.where(dims[:, 4] > 0, matmul_speed.transposed_gflops[format_], matmul_speed.gflops[format_])
    moved_bytes = count_matmul_operand_bytes(dims, format_)
    rates_gb_s = (
        matmul_speed.copied_gb_s[format_],
        matmul_speed.other_gb_s[format_],
        matmul_speed.result_gb_s[format_],
    )
    return matmul_speed.call_us[format_] * 1e-6 + (flops / gflops + moved_bytes @ (1 / np.array(rates_gb_s))) / 1e9


def count_matmul_operand_bytes(dims: FloatArray, format_: str) -> FloatArray:
    """Bytes of the operand that is copied, of the other one and of the result: shape (products, 3)."""
    batch, m, n, k, transposed = dims.T
    left, right, result = (get_torch_dtype(format_).itemsize * batch * size for size in (m * k, k * n, m * n))
    copied, other = np.where(transposed > 0, left, right), np.where(transposed > 0, right, left)
    return np.stack([copied, other, result], axis=1)


def compute_cpu_attention_seconds(
    dims: FloatArray, flops: FloatArray, is_backward: np.ndarray, format_: str, processor: ProcessorSpeed
) -> FloatArray:
    """Seconds of fused attention in one format, for shapes (batch, heads, queries, keys, head dimension)."""
    num_blocks, executed_flops = count_attention_work(dims, flops, is_backward)
    attention_speed = processor.attention
    block_us = np.where(
        is_backward, attention_speed.backward_block_us[format_], attention_speed.forward_block_us[format_]
    )
    gflops = np.where(is_backward, attention_speed.backward_gflops[format_], attention_speed.forward_gflops[format_])
    return num_blocks * block_us * 1e-6 + executed_flops / gflops / 1e9


def count_attention_work(dims: FloatArray, flops: FloatArray, is_backward: np.ndarray) -> tuple[FloatArray, FloatArray]:
    """Blocks of queries and keys that fused attention starts, and FLOPs it executes.

    Parameters
    ----------
    flops: array
        As in `KernelArrays`: half of those over the whole square of scores where attention is causal.
    """
    batch, heads, queries, keys, _ = dims.T
    whole_flops = (
        2 * np.where(is_backward, ATTENTION_BACKWARD_MATMULS, ATTENTION_FORWARD_MATMULS) * np.prod(dims, axis=1)
    )
    key_blocks = np.ceil(keys / ATTENTION_KEYS_PER_BLOCK)
    # Of `across` blocks of keys, causal attention computes 1 for the first queries, all for the last.
    computed_share = np.where(flops < 0.75 * whole_flops, (key_blocks + 1) / (2 * key_blocks), 1.0)
    query_block_sizes = np.array([find_query_block_size(int(count)) for count in queries])
    return batch * heads * np.ceil(
        queries / query_block_sizes
    ) * key_blocks * computed_share, whole_flops * computed_share


def _require_format(format_name: str, hardware: Hardware, processor: ProcessorSpeed) -> None:
    if format_name not in processor.products.gflops:
        raise ValueError(f"hardware={hardware.name} has no speed for {format_name}")
