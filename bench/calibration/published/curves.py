"""Curves of the cost model fitted to the points of one device: products, fused attention, collectives inside a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.calibration.fit_processor import fit_least_squares
from bench.calibration.published.devices import POINT_PEAK_TFLOPS
from bench.calibration.published.points import HALF_PRECISION_BYTES
from bench.hardware.attention_kernels import SDPA
from bench.hardware.speeds import AttentionKernelSpeed, AttentionSpeed, LinkSpeeds, MatmulSpeed
from bench.prediction.cost.attention import compute_attention_seconds
from bench.prediction.cost.collectives import CollectiveGroup, compute_collective_seconds
from bench.prediction.cost.kernels import (
    compute_matmul_seconds,
    find_alignment_shares,
)
from bench.prediction.trace.kernels import (
    ALIGNED_ROW_BYTES,
    ATTENTION_BACKWARD_MATMULS,
    ATTENTION_FORWARD_MATMULS,
    FloatArray,
)

MAX_SHARE = 0.98
"""Of a peak on paper: boards of the same name boost beyond the clock that their peak is counted at."""
ASSUMED_BYTES_SHARE = 0.9
"""Of the memory's bandwidth, where a small product waits for it."""
KERNEL_LAUNCH_S = 2e-6

INITIAL_OVERHEAD_US = 3.0
INITIAL_PRODUCTS = (0.75, 48.0)
INITIAL_UNALIGNED_SHARE = 0.5
INITIAL_STREAMING = (0.8, 3.0)
INITIAL_ATTENTION = (0.6, 0.5, 32.0, 128.0)
"""Forward, backward, half_width, half_length."""
INITIAL_WEIGHT = 0.05
"""Weight of these beside that of a timing, so that what no point shows stays where it begins."""
LARGE_COLLECTIVE_BYTES, LARGE_COLLECTIVE_WEIGHT = 2**24, 4
"""From this size on, where FSDP gathers, a timing counts so many times."""

SIGNIFICANT_DIGITS = 3


@dataclass(frozen=True)
class CurveErrors:
    """Relative errors of a fitted curve, absolute values."""

    count: int
    median: float
    ninth_decile: float

    @classmethod
    def compare(cls, predicted_s: FloatArray, measured_s: FloatArray) -> CurveErrors:
        """Of predicted against measured seconds."""
        errors = np.abs(predicted_s / measured_s - 1)
        return cls(len(errors), float(np.median(errors)), float(np.quantile(errors, 0.9)))


def hold_out_third(points: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Points to fit on and every third to judge by, spread evenly over shapes that are sorted in the files."""
    is_held_out = np.arange(len(points)) % 3 == 2
    return points[~is_held_out], points[is_held_out]


def round_number(value: float) -> float:
    """As it is written to a description."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


# --- Matrix products.


def predict_products(
    points: pd.DataFrame,
    matmul: MatmulSpeed,
    peak_tflops: float,
    bandwidth_gb_s: float,
    overhead_us: float = 0.0,
    arithmetic_shares: FloatArray | float = 1.0,
) -> FloatArray:
    """Seconds of products in bf16 in short bursts; `arithmetic_shares` of the speed that arithmetic has."""
    shapes = points[["batch", "m", "n", "k"]].to_numpy(dtype=float)
    batch, m, n, k = shapes.T
    reached_flops = peak_tflops * 1e12 * matmul.efficiency["bf16"]
    arithmetic_s = compute_matmul_seconds(shapes, reached_flops, matmul) / arithmetic_shares
    moved_bytes = HALF_PRECISION_BYTES * batch * (m * k + k * n + m * n)
    memory_s = moved_bytes / (bandwidth_gb_s * 1e9 * ASSUMED_BYTES_SHARE)
    return np.maximum(arithmetic_s, memory_s) + KERNEL_LAUNCH_S + overhead_us * 1e-6


def count_product_seconds(points: pd.DataFrame) -> FloatArray:
    """Seconds that were measured."""
    return (2 * points.batch * points.m * points.n * points.k / points.tflops / 1e12).to_numpy(dtype=float)


def fit_products(
    points: pd.DataFrame, multiprocessors: int, peak_tflops: float, bandwidth_gb_s: float
) -> tuple[MatmulSpeed, float]:
    """Efficiency and half depth, and the microseconds that the benchmark itself added to every call."""

    def build(parameters: FloatArray) -> MatmulSpeed:
        return MatmulSpeed({"bf16": min(MAX_SHARE, float(parameters[0]))}, multiprocessors, float(parameters[1]))

    def predict(parameters: FloatArray) -> FloatArray:
        return predict_products(points, build(parameters), peak_tflops, bandwidth_gb_s, float(parameters[2]))

    parameters = fit_least_squares(
        predict, count_product_seconds(points).tolist(), (*INITIAL_PRODUCTS, INITIAL_OVERHEAD_US)
    )
    return build(parameters), float(parameters[2])


def fit_product_efficiency(
    points: pd.DataFrame, matmul: MatmulSpeed, peak_tflops: float, bandwidth_gb_s: float
) -> float:
    """The efficiency alone, for a few products on a device whose other numbers are known or assumed."""

    def predict(parameters: FloatArray) -> FloatArray:
        changed = dataclasses.replace(matmul, efficiency={"bf16": float(parameters[0])})
        return predict_products(points, changed, peak_tflops, bandwidth_gb_s)

    return min(
        MAX_SHARE, float(fit_least_squares(predict, count_product_seconds(points).tolist(), INITIAL_PRODUCTS[:1])[0])
    )


def predict_products_by_alignment(
    points: pd.DataFrame,
    matmul: MatmulSpeed,
    efficiency_by_series: Mapping[str, float],
    peak_tflops: float,
    bandwidth_gb_s: float,
) -> FloatArray:
    """Seconds of products whose rows may not be aligned, at the efficiency that aligned ones of their series reach."""
    shares = find_alignment_shares(points.row_bytes.to_numpy(), matmul)
    return predict_products(
        points,
        dataclasses.replace(matmul, efficiency={"bf16": 1.0}),
        peak_tflops,
        bandwidth_gb_s,
        arithmetic_shares=shares * points.series.map(efficiency_by_series).to_numpy(dtype=float),
    )


def fit_unaligned_shares(
    points: pd.DataFrame, matmul: MatmulSpeed, peak_tflops: float, bandwidth_gb_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """What is left of the speed of products whose rows are not aligned, by the bytes they are aligned to; and the
    efficiency that aligned products reach in each series of timings, which differ in how they were made.

    Parameters
    ----------
    points: DataFrame
        As `bench.calibration.published.points.read_products_by_alignment` has them.
    """
    sizes = [str(size) for size in sorted(points.row_bytes.unique()) if size < ALIGNED_ROW_BYTES]
    series = sorted(points.series.unique())

    def build(parameters: FloatArray) -> tuple[dict[str, float], dict[str, float]]:
        shares, efficiencies = parameters[: len(sizes)], parameters[len(sizes) :]
        return (
            {size: min(1.0, float(share)) for size, share in zip(sizes, shares, strict=True)},
            {name: float(efficiency) for name, efficiency in zip(series, efficiencies, strict=True)},
        )

    def predict(parameters: FloatArray) -> FloatArray:
        shares, efficiencies = build(parameters)
        changed = dataclasses.replace(matmul, unaligned_share=shares)
        return predict_products_by_alignment(points, changed, efficiencies, peak_tflops, bandwidth_gb_s)

    initial = [INITIAL_UNALIGNED_SHARE] * len(sizes) + [INITIAL_PRODUCTS[0]] * len(series)
    return build(fit_least_squares(predict, count_product_seconds(points).tolist(), initial))


# --- Kernels bound by memory.


def predict_streaming(points: pd.DataFrame, share: float, kernel_us: float, bandwidth_gb_s: float) -> FloatArray:
    """Seconds of kernels that read and write so many bytes once."""
    return points.bytes.to_numpy(dtype=float) / (share * bandwidth_gb_s * 1e9) + kernel_us * 1e-6


def fit_streaming(points: pd.DataFrame, bandwidth_gb_s: float) -> tuple[float, float]:
    """Share of the bandwidth on paper, and the microseconds that a kernel takes beyond its bytes."""
    share, kernel_us = fit_least_squares(
        lambda parameters: predict_streaming(points, float(parameters[0]), float(parameters[1]), bandwidth_gb_s),
        points.seconds.tolist(),
        INITIAL_STREAMING,
    )
    return min(MAX_SHARE, float(share)), float(kernel_us)


# --- Fused attention.


def predict_attention(
    points: pd.DataFrame,
    kernel: AttentionKernelSpeed,
    multiprocessors: int,
    peak_tflops: float,
    engine_overhead_us: float = 0.0,
) -> FloatArray:
    """Seconds of one kernel in short bursts."""
    operators = ["attention_backward" if is_backward else "attention_forward" for is_backward in points.is_backward]
    peaks = points.gpu.map(POINT_PEAK_TFLOPS).fillna(peak_tflops).to_numpy(dtype=float)
    dims = points[["batch", "heads", "queries", "queries", "head_dimension"]].to_numpy(dtype=float)
    flops, attention = _count_attention_flops(points), AttentionSpeed({SDPA: kernel})
    seconds = compute_attention_seconds(operators, dims, flops, 1e12, attention, multiprocessors) / peaks
    return seconds + KERNEL_LAUNCH_S + np.where(points.is_engine, engine_overhead_us * 1e-6, 0.0)


def count_attention_seconds(points: pd.DataFrame) -> FloatArray:
    """Seconds that were measured."""
    return _count_attention_flops(points) / points.tflops.to_numpy(dtype=float) / 1e12


def _count_attention_flops(points: pd.DataFrame) -> FloatArray:
    num_matmuls = np.where(points.is_backward, ATTENTION_BACKWARD_MATMULS, ATTENTION_FORWARD_MATMULS)
    square = points.batch * points.heads * points.queries**2 * points.head_dimension
    return np.asarray(2 * num_matmuls * square / np.where(points.is_causal, 2, 1), dtype=float)


def fit_attention(points: pd.DataFrame, multiprocessors: int, peak_tflops: float) -> tuple[AttentionKernelSpeed, float]:
    """One kernel's numbers, and the microseconds that an inference engine adds around it."""

    def build(parameters: FloatArray) -> AttentionKernelSpeed:
        forward, backward, half_width, half_length = (float(parameter) for parameter in parameters[:4])
        return AttentionKernelSpeed(min(MAX_SHARE, forward), min(MAX_SHARE, backward), half_width, half_length)

    def predict(parameters: FloatArray) -> FloatArray:
        seconds = predict_attention(points, build(parameters), multiprocessors, peak_tflops, float(parameters[4]))
        return np.concatenate([seconds, (parameters[:4] / INITIAL_ATTENTION) ** INITIAL_WEIGHT])

    initial = (*INITIAL_ATTENTION, INITIAL_OVERHEAD_US)
    parameters = fit_least_squares(predict, [*count_attention_seconds(points), *np.ones(4)], initial)
    return build(parameters), float(parameters[4])


# --- Collectives inside a node.


def predict_collectives(points: pd.DataFrame, links: LinkSpeeds) -> FloatArray:
    """Seconds of collectives among GPUs of one node."""
    return np.array(
        [
            compute_collective_seconds(str(kind), float(size_bytes), CollectiveGroup(int(ranks), int(ranks)), links)
            for kind, size_bytes, ranks in zip(points.kind, points.size_bytes, points.ranks, strict=True)
        ]
    )


def fit_links(points: pd.DataFrame, links: LinkSpeeds) -> LinkSpeeds:
    """Bandwidth by number of GPUs, latency, and what switches that add save an all-reduce."""
    group_sizes: Sequence[int] = sorted(points.ranks.unique())
    large = points[points.size_bytes >= LARGE_COLLECTIVE_BYTES]
    weighted = pd.concat([points, *[large] * (LARGE_COLLECTIVE_WEIGHT - 1)])

    def build(parameters: FloatArray) -> LinkSpeeds:
        rates = np.array(parameters[: len(group_sizes)]) / links.gpu_gb_s
        shares = {str(size): float(rate / rates.max()) for size, rate in zip(group_sizes, rates, strict=True)}
        latency, all_reduce = (float(parameter) for parameter in parameters[len(group_sizes) :])
        return dataclasses.replace(
            links,
            gpu_efficiency=min(1.0, float(rates.max())),
            gpu_group_share=shares,
            gpu_latency=latency,
            gpu_all_reduce=all_reduce,
        )

    initial = [links.gpu_gb_s * 0.7] * len(group_sizes) + [1.0, 1.0]
    return build(
        fit_least_squares(
            lambda parameters: predict_collectives(weighted, build(parameters)), weighted.seconds.tolist(), initial
        )
    )
