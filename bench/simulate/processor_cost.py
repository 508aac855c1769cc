"""How long operators take on a processor that computes by itself: everything adds up, nothing runs beside it."""

from __future__ import annotations

import numpy as np

from bench.hardware import Hardware
from bench.hardware.processor import Processor
from bench.precision import Precision, dtype_of
from bench.simulate.cpu_memory import query_rows
from bench.simulate.kernels import ATTENTION, BACKWARD_PRODUCTS, FORMATS, FORWARD_PRODUCTS, MATMUL, Floats, Kernels

KEYS_PER_BLOCK = 512
"""Keys that the CPU's attention takes at once (``kvSplitSize`` in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
Causal attention leaves out blocks that are masked altogether, not parts of one."""


def computing_seconds(kernels: Kernels, hardware: Hardware, precision: Precision) -> Floats:
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
    for number, name in enumerate(FORMATS):
        here = (kernels.kinds == MATMUL) & (kernels.formats == number)
        if np.any(here):
            format_ = "fp32" if name == "other" else name
            _require_format(format_, hardware, processor)
            seconds[here] = product_seconds(kernels.dims[here], kernels.flops[here], format_, processor)
    here = kernels.kinds == ATTENTION
    if np.any(here):
        _require_format(precision.compute, hardware, processor)
        backward = np.array(["backward" in operator for operator in kernels.operators])[here]
        seconds[here] = attention_seconds(
            kernels.dims[here], kernels.flops[here], backward, precision.compute, processor
        )
    return seconds


def product_seconds(dims: Floats, flops: Floats, format_: str, processor: Processor) -> Floats:
    """Seconds of matrix products of one format, for shapes (batch, m, n, k, 1 if the left operand is transposed)."""
    speed = processor.products
    gflops = np.where(dims[:, 4] > 0, speed.transposed_gflops[format_], speed.gflops[format_])
    moved = product_bytes(dims, format_)
    rates = (speed.copied_gb_s[format_], speed.other_gb_s[format_], speed.result_gb_s[format_])
    return speed.call_us[format_] * 1e-6 + (flops / gflops + moved @ (1 / np.array(rates))) / 1e9


def product_bytes(dims: Floats, format_: str) -> Floats:
    """Bytes of the operand that is copied, of the other one and of the result: shape (products, 3)."""
    batch, m, n, k, transposed = dims.T
    left, right, result = (dtype_of(format_).itemsize * batch * size for size in (m * k, k * n, m * n))
    copied, other = np.where(transposed > 0, left, right), np.where(transposed > 0, right, left)
    return np.stack([copied, other, result], axis=1)


def attention_seconds(dims: Floats, flops: Floats, backward: np.ndarray, format_: str, processor: Processor) -> Floats:
    """Seconds of fused attention in one format, for shapes (batch, heads, queries, keys, head dimension)."""
    blocks, executed = attention_work(dims, flops, backward)
    speed = processor.attention
    block_us = np.where(backward, speed.backward_block_us[format_], speed.forward_block_us[format_])
    gflops = np.where(backward, speed.backward_gflops[format_], speed.forward_gflops[format_])
    return blocks * block_us * 1e-6 + executed / gflops / 1e9


def attention_work(dims: Floats, flops: Floats, backward: np.ndarray) -> tuple[Floats, Floats]:
    """Blocks of queries and keys that fused attention starts, and FLOPs it executes.

    Parameters
    ----------
    flops: array
        As in `Kernels`: half of those over the whole square of scores where attention is causal.
    """
    batch, heads, queries, keys, _ = dims.T
    whole = 2 * np.where(backward, BACKWARD_PRODUCTS, FORWARD_PRODUCTS) * np.prod(dims, axis=1)
    across = np.ceil(keys / KEYS_PER_BLOCK)
    # Of `across` blocks of keys, causal attention computes 1 for the first queries, all for the last.
    share = np.where(flops < 0.75 * whole, (across + 1) / (2 * across), 1.0)
    rows = np.array([query_rows(int(count)) for count in queries])
    return batch * heads * np.ceil(queries / rows) * across * share, whole * share


def _require_format(name: str, hardware: Hardware, processor: Processor) -> None:
    if name not in processor.products.gflops:
        raise ValueError(f"hardware={hardware.name} has no speed for {name}")
