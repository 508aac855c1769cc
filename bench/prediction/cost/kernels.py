"""How long operators take on a processor that computes by itself: everything adds up, nothing runs beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.core.precision import Precision, get_torch_dtype
from bench.hardware import Hardware
from bench.hardware.speeds import HardwareSpeeds, MatmulSpeed, ProcessorSpeed
from bench.hardware.sustained_clocks import POWER_EXPONENT, compute_clock_share
from bench.prediction.cost.attention import build_fp32_attention, choose_attention_kernel, compute_attention_seconds
from bench.prediction.trace.kernels import (
    ATTENTION,
    ATTENTION_BACKWARD_MATMULS,
    ATTENTION_FORWARD_MATMULS,
    FALLBACK_NAME_PART,
    GROUPED_DEPTH_SUFFIX,
    GROUPED_MATMUL_NAME_PART,
    MATMUL,
    MEMORY_BOUND,
    OPERAND_FORMATS,
    FloatArray,
    IntArray,
    KernelArrays,
    find_query_block_size,
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


# --- How long kernels take on a device: matrix products by their shape, fused attention, everything else by its bytes.

MATMUL_TILES = (
    (256, 128, 1.00),
    (128, 256, 1.00),
    (128, 128, 0.95),
    (256, 64, 0.85),
    (64, 256, 0.85),
    (128, 64, 0.80),
    (64, 128, 0.80),
    (64, 64, 0.65),
)
"""Tile sizes that cuBLAS uses (section 2.3 of the guide, from most to least efficient), and the share of the best
one's speed: smaller tiles read each operand more often. The guide draws the shares for one product; these are round."""

K_SPLIT_COUNTS = (1, 2, 4, 8)
"""Parts that k may be cut into, each a thread block of its own; their results are added in a further pass."""

GROUPED_TILE_ROWS, GROUPED_TILE_COLUMNS, GROUPED_TILE_DEPTH = 128, 256, 64
"""Tile of `torch.nn.functional.grouped_mm`, whose thread blocks of all experts run in common waves. Assumed of every
GPU, not measured: the one that aten/src/ATen/native/cuda/GroupMM.cu has CUTLASS use for large products on sm90."""

REDUCE_INPUT_OPERATOR = "_chunk_cat"
"""Puts gradients where FSDP2 reduces them from."""

OPERATOR_BANDWIDTH_SHARES = {
    "embedding_dense_backward": 0.20,
    "_embedding_bag_dense_backward": 0.20,
    "native_layer_norm_backward": 0.60,
    "cumsum": 0.50,
    "index_put": 0.30,
    "index_add": 0.30,
    "nll_loss_backward": 0.80,
    REDUCE_INPUT_OPERATOR: 0.57,
}
"""Operators that sort, scatter or reduce over columns: share of what elementwise kernels reach. Rough, and small in
any step of a large model. A calibration measures them instead. That of ``_chunk_cat`` is the geometric mean of an
H100's and an H200's (0.67 and 0.49: results/calibration/h100_profiled_kernels.csv and h200_profiled_kernels.csv)."""

HALF_PRECISION_FORMATS = {"bf16", "fp16"}
"""Formats for which an operator may have a speed of its own."""


def compute_kernel_seconds(
    kernels: KernelArrays,
    hardware: Hardware,
    precision: Precision,
    expert_tokens: Sequence[int] = (),
    repetitions: FloatArray | None = None,
) -> FloatArray:
    """Seconds of each kernel, one after the other, at the clocks that a device keeps up which does this and no more.

    On a CPU without what is spent around operators.

    Parameters
    ----------
    expert_tokens: sequence of int
        Tokens of a sequence that each expert takes, of the model whose kernels these are. On a CPU, which rounds
        nothing up, it makes no difference.
    repetitions: array or None
        How often each kernel runs in a step; None for as often as the others.

    Raises
    ------
    ValueError
        If the hardware's speeds or the peak of a format are unknown.
    """
    speeds = hardware.speeds
    if speeds is None or hardware.memory_bandwidth_gb_s is None:
        raise ValueError(f"hardware={hardware.name} has no speeds: time cannot be predicted")
    bandwidth = hardware.memory_bandwidth_gb_s * 1e9 * speeds.memory_efficiency
    bandwidth_shares = np.array(
        [
            find_bandwidth_share(operator, speeds, OPERAND_FORMATS[format_])
            for operator, format_ in zip(kernels.operators, kernels.formats, strict=True)
        ]
    )
    memory_seconds = kernels.bytes_moved / (bandwidth * bandwidth_shares)
    if speeds.processor is not None:
        arithmetic_seconds = compute_cpu_arithmetic_seconds(kernels, hardware, precision)
        return (
            np.where(kernels.kinds == MEMORY_BOUND, memory_seconds, arithmetic_seconds) + speeds.launch.kernel_us * 1e-6
        )
    arithmetic_seconds, sustained_shares = _compute_burst_seconds(kernels, hardware, precision, expert_tokens)
    counts = np.ones(len(kernels)) if repetitions is None else repetitions
    burst_seconds = np.maximum(memory_seconds, arithmetic_seconds)
    sustained_shares[arithmetic_seconds < memory_seconds] = 1.0
    clock_share = compute_clock_share(counts * burst_seconds, sustained_shares)
    # Slower clocks leave what memory takes as it is, and kernels that draw too little to be slowed for it.
    arithmetic_seconds[sustained_shares < 1] /= clock_share
    arithmetic_seconds /= speeds.many_gpus_share
    return np.maximum(memory_seconds, arithmetic_seconds) + speeds.launch.kernel_us * 1e-6


def _compute_burst_seconds(
    kernels: KernelArrays, hardware: Hardware, precision: Precision, expert_tokens: Sequence[int]
) -> tuple[FloatArray, FloatArray]:
    """Seconds of arithmetic on a GPU in short bursts, for kernels that wait for nothing else, and the share of that
    speed that each would keep up alone."""
    speeds = hardware.speeds
    assert speeds is not None
    assert speeds.matmul is not None
    seconds, sustained_shares = np.zeros(len(kernels)), np.ones(len(kernels))
    is_matmul, is_attention = kernels.kinds == MATMUL, kernels.kinds == ATTENTION
    for format_index, format_name in enumerate(OPERAND_FORMATS):
        if np.any(selected := is_matmul & (kernels.formats == format_index)):
            peak_name, burst_flops = _find_burst_flops(format_name, hardware, speeds, precision)
            seconds[selected] = compute_matmul_seconds(kernels.dims[selected, :4], burst_flops, speeds.matmul)
            sustained_shares[selected] = speeds.matmul.sustained_share.get(peak_name, 1.0)
            row_bytes = kernels.row_bytes[selected]
            if format_name in HALF_PRECISION_FORMATS or precision.tf32:
                alignment_shares = find_alignment_shares(row_bytes, speeds.matmul)
                seconds[selected] /= alignment_shares
                sustained_shares[selected] = np.minimum(
                    1.0, sustained_shares[selected] * alignment_shares**-POWER_EXPONENT
                )  # the slower they are, the less they draw
            for index in _find_grouped_kernels(kernels, selected) if expert_tokens else ():
                seconds[index] = compute_grouped_matmul_seconds(
                    kernels.operators[index],
                    kernels.dims[index],
                    kernels.flops[index],
                    expert_tokens,
                    burst_flops,
                    speeds,
                )
    if np.any(is_attention):
        # Its operands are of two formats: one number per row of scores is kept in fp32, whatever it computes in.
        peak_name, _ = _find_burst_flops(precision.compute, hardware, speeds, precision)
        assert speeds.attention is not None
        attention = speeds.attention
        if precision.compute == "fp32":
            attention = build_fp32_attention(attention, hardware.peak_tflops, peak_name)
        operators = [kernels.operators[index] for index in np.flatnonzero(is_attention)]
        seconds[is_attention] = compute_attention_seconds(
            operators,
            kernels.dims[is_attention],
            kernels.flops[is_attention],
            hardware.peak_tflops[peak_name] * 1e12,
            attention,
            speeds.matmul.multiprocessors,
        )
        sustained_shares[is_attention] = [
            attention.kernels[choose_attention_kernel(attention, operator)].sustained_share for operator in operators
        ]
    return seconds, sustained_shares


def compute_matmul_seconds(shapes: FloatArray, flops_per_s: float, matmul: MatmulSpeed) -> FloatArray:
    """Seconds of matrix products that wait for nothing but arithmetic.

    A thread block takes ``2 * rows * columns * (k / split + half_depth)`` multiplications and additions at the speed of
    one multiprocessor; thread blocks run in waves of as many as there are multiprocessors.

    Parameters
    ----------
    shapes: array
        Of shape (products, 4): batch, m, n, k.
    flops_per_s: float
        What the whole device reaches on large products.
    """
    batch, m, n, k = (column[:, None] for column in shapes.T)
    flops_per_multiprocessor = flops_per_s / matmul.multiprocessors
    split_counts = np.array(K_SPLIT_COUNTS)[None, :]
    best_seconds = np.full(len(shapes), np.inf)
    for rows, columns, tile_efficiency in MATMUL_TILES:
        thread_blocks = batch * np.ceil(m / rows) * np.ceil(n / columns) * split_counts
        waves = np.ceil(thread_blocks / matmul.multiprocessors)
        flops_per_block = 2 * rows * columns * (k / split_counts + matmul.half_depth * (1 + (split_counts > 1)))
        best_seconds = np.minimum(
            best_seconds, np.min(waves * flops_per_block / (flops_per_multiprocessor * tile_efficiency), axis=1)
        )
    return best_seconds


def find_alignment_shares(row_bytes: IntArray, matmul: MatmulSpeed) -> FloatArray:
    """Share of the speed of aligned products that others of 16-bit formats have, by what their rows are aligned to."""
    shares = np.ones(len(row_bytes))
    for size_bytes, share in matmul.unaligned_share.items():
        shares[row_bytes == int(size_bytes)] = share
    return shares


def _find_grouped_kernels(kernels: KernelArrays, selected: npt.NDArray[np.bool_]) -> list[int]:
    """Indices of those of the selected kernels that multiply the tokens of each expert with its weight."""
    return [int(index) for index in np.flatnonzero(selected) if GROUPED_MATMUL_NAME_PART in kernels.operators[index]]


def compute_grouped_matmul_seconds(
    operator: str,
    dims: FloatArray,
    flops: float,
    expert_tokens: Sequence[int],
    flops_per_s: float,
    speeds: HardwareSpeeds,
) -> float:
    """Seconds of the products of all experts, each of its own tokens, that wait for nothing but arithmetic.

    As `compute_matmul_seconds` has it, with the thread blocks of all experts in common waves: every expert's rows are
    rounded up to whole tiles. Where experts share out the depth, thread blocks differ in length, and the longest takes
    as long as it does. An operator that multiplies one expert after the other runs waves of its own for each.

    Parameters
    ----------
    dims: array
        As in `KernelArrays`: batch (experts times products), and m, n, k of an expert that has its even share.
    flops: float
        Of all of it.
    """
    assert speeds.matmul is not None
    batch, m, n, k = dims[:4]
    shares = np.array(expert_tokens) / sum(expert_tokens)
    num_products = batch / len(shares)  # less than one where a rank has but some of the experts
    flops_per_multiprocessor, half_depth = flops_per_s / speeds.matmul.multiprocessors, speeds.matmul.half_depth
    tile_flops_per_depth = 2 * GROUPED_TILE_ROWS * GROUPED_TILE_COLUMNS
    if operator.endswith(GROUPED_DEPTH_SUFFIX):
        depths = flops / (2 * m * n * num_products) * shares
        depths = GROUPED_TILE_DEPTH * np.ceil(depths / GROUPED_TILE_DEPTH) + half_depth
        thread_blocks = batch * np.ceil(m / GROUPED_TILE_ROWS) * np.ceil(n / GROUPED_TILE_COLUMNS)
        waves = np.ceil(thread_blocks / speeds.matmul.multiprocessors)
        depth = max(waves * depths.mean(), depths.max())
        return float(depth * tile_flops_per_depth / flops_per_multiprocessor)
    rows = flops / (2 * n * k * num_products) * shares
    if FALLBACK_NAME_PART in operator:
        shapes = np.array([(num_products, expert_rows, n, k) for expert_rows in rows if expert_rows])
        return float(compute_matmul_seconds(shapes, flops_per_s, speeds.matmul).sum())
    thread_blocks = num_products * np.ceil(rows / GROUPED_TILE_ROWS).sum() * np.ceil(n / GROUPED_TILE_COLUMNS)
    waves = np.ceil(thread_blocks / speeds.matmul.multiprocessors)
    return float(waves * tile_flops_per_depth * (k + half_depth) / flops_per_multiprocessor)


def _find_burst_flops(
    format_name: str, hardware: Hardware, speeds: HardwareSpeeds, precision: Precision
) -> tuple[str, float]:
    """The format whose peak counts for operands in a format, and FLOP/s of large matrix products in short bursts."""
    peak_name = (
        "tf32" if format_name == "fp32" and precision.tf32 else "fp32" if format_name == "other" else format_name
    )
    assert speeds.matmul is not None
    peak_tflops, efficiency = hardware.peak_tflops.get(peak_name), speeds.matmul.efficiency.get(peak_name)
    if peak_tflops is None or efficiency is None:
        raise ValueError(f"hardware={hardware.name} has no speed for {peak_name}")
    return peak_name, peak_tflops * 1e12 * efficiency


def find_bandwidth_share(operator: str, speeds: HardwareSpeeds, format_: str = "other") -> float:
    """Share of the elementwise kernels' bandwidth that an operator reaches on operands of a format."""
    name = operator.removeprefix("aten.").removeprefix("aten::").split(".")[0]
    bandwidth_shares = OPERATOR_BANDWIDTH_SHARES if speeds.operators is None else speeds.operators
    return bandwidth_shares.get(build_operator_key(name, format_), bandwidth_shares.get(name, 1.0))


def build_operator_key(name: str, format_: str) -> str:
    """What `Speeds.operators` calls an operator on operands of a format."""
    return f"{name} {format_}" if format_ in HALF_PRECISION_FORMATS else name
