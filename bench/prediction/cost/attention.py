"""How long fused attention takes on a GPU, and which kernel it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from bench.hardware.attention_kernels import EFFICIENT, choose_sdpa_kernel
from bench.hardware.speeds import AttentionSpeed
from bench.prediction.trace.kernels import (
    ATTENTION_BACKWARD_MATMULS,
    ATTENTION_FORWARD_MATMULS,
    BIAS_SUFFIX,
    LEARNED_BIAS_SUFFIX,
    FloatArray,
)

ATTENTION_BLOCK_QUERIES = 128
"""Queries that a thread block of fused attention takes (FlashAttention-2 and -3: 128 at head dimensions up to 128)."""

HEAD_DIMENSION_MULTIPLE = 32
"""Fused attention is compiled for head dimensions that are multiples of this, and pads others."""


def compute_attention_seconds(
    operators: Sequence[str],
    dims: FloatArray,
    flops: FloatArray,
    peak_flops: float,
    attention: AttentionSpeed,
    multiprocessors: int,
) -> FloatArray:
    """Seconds of fused attention on a GPU, in short bursts.

    Every thread block takes some queries of a head through its keys. To the time of its products comes that of the
    exponentials between them (a head narrower by half has as many), of its start and end, and of multiprocessors that
    wait for the last block: half a block's time on average, a whole one's where causal blocks differ in length.

    Parameters
    ----------
    operators: sequence of str
        Names; those of the backward pass say so, those with a bias end in `BIAS_SUFFIX` or `LEARNED_BIAS_SUFFIX`.
    dims, flops: array
        As in `KernelArrays`.
    peak_flops: float
        FLOP/s of the device on paper.
    """
    numbers_by_kernel = {name: dataclasses.astuple(kernel) for name, kernel in attention.kernels.items()}
    names = [choose_attention_kernel(attention, operator) for operator in operators]
    is_backward = np.array(["backward" in operator for operator in operators])
    forward, backward, half_width, half_length, _ = np.array([numbers_by_kernel[name] for name in names], dtype=float).T
    batch, heads, queries, keys, head_dimension = dims.T
    num_matmuls = np.where(is_backward, ATTENTION_BACKWARD_MATMULS, ATTENTION_FORWARD_MATMULS)
    is_causal = flops < 0.75 * 2 * num_matmuls * np.prod(dims, axis=1)
    padded_dimension = HEAD_DIMENSION_MULTIPLE * np.ceil(head_dimension / HEAD_DIMENSION_MULTIPLE)
    width_factor = (padded_dimension + half_width) / head_dimension
    length_factor = 1 + half_length / (keys * np.where(is_causal, 0.5, 1.0))
    thread_blocks = batch * heads * np.ceil(queries / ATTENTION_BLOCK_QUERIES)
    tail_factor = 1 + multiprocessors * np.where(is_causal, 1.0, 0.5) / thread_blocks
    burst_flops = peak_flops * np.where(is_backward, backward, forward)
    return flops * width_factor * length_factor * tail_factor / burst_flops


FP32_ATTENTION_FORWARD, FP32_ATTENTION_BACKWARD = 0.42, 0.335
"""Speed of the memory-efficient kernel in fp32 over that in 16 bits, where there are units for TF32: one H100, 4 x 2048
tokens, heads of 128 (results/calibration/h100_profiled_totals.csv)."""


def build_fp32_attention(attention: AttentionSpeed, peak_tflops: Mapping[str, float], peak_name: str) -> AttentionSpeed:
    """In fp32 PyTorch runs the memory-efficient kernel: FlashAttention and cuDNN's take 16 bits alone. Whether TF32 is
    allowed makes no difference to it.

    Parameters
    ----------
    peak_name: str
        Format whose peak the result's shares are of.
    """
    efficient = attention.kernels.get(EFFICIENT)
    if efficient is None:
        return attention
    if "tf32" in peak_tflops:
        peak_ratio = peak_tflops["bf16"] / peak_tflops[peak_name]
        efficient = dataclasses.replace(
            efficient,
            forward=efficient.forward * FP32_ATTENTION_FORWARD * peak_ratio,
            backward=efficient.backward * FP32_ATTENTION_BACKWARD * peak_ratio,
        )
    return AttentionSpeed({EFFICIENT: efficient}, EFFICIENT)


def choose_attention_kernel(attention: AttentionSpeed, operator: str) -> str:
    """Name of the kernel that runs."""
    if attention.kernel != "auto":
        return attention.kernel
    learns_bias = operator.endswith(LEARNED_BIAS_SUFFIX)
    return choose_sdpa_kernel(
        attention.kernels, has_bias=learns_bias or operator.endswith(BIAS_SUFFIX), learns_bias=learns_bias
    )
