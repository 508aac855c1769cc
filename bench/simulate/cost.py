"""How long kernels take on a device: matrix products by their shape, fused attention, everything else by its bytes.

What follows holds for GPUs; `bench.simulate.processor_cost` says what is different on a CPU.

A matrix product is cut into tiles, one thread block each; the device computes as many at once as it has
multiprocessors, so a last wave that is not full, and a tile that reaches over the edge, take as long as full ones. The
library chooses tile size and splitting of k to make the best of it. NVIDIA describes this in its "Matrix Multiplication
Background User's Guide" (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication).
"""

from __future__ import annotations

import numpy as np

from bench.hardware import Hardware
from bench.hardware.speeds import Speeds
from bench.precision import Precision
from bench.simulate.kernels import ATTENTION, FORMATS, MATMUL, MEMORY, Floats, Kernels
from bench.simulate.processor_cost import computing_seconds

TILES = (
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

SPLITS = (1, 2, 4, 8)
"""Parts that k may be cut into, each a thread block of its own; their results are added in a further pass."""

SLOW = {
    "embedding_dense_backward": 0.20,
    "_embedding_bag_dense_backward": 0.20,
    "native_layer_norm_backward": 0.60,
    "cumsum": 0.50,
    "index_put": 0.30,
    "index_add": 0.30,
    "nll_loss_backward": 0.80,
}
"""Operators that sort, scatter or reduce over columns: share of what elementwise kernels reach. Rough, and small in
any step of a large model. A calibration measures them instead."""

NARROW = {"bf16", "fp16"}
"""Formats for which an operator may have a speed of its own."""

HEAD_DIMENSIONS = 32
"""Fused attention is compiled for head dimensions that are multiples of this, and pads others."""


def kernel_seconds(kernels: Kernels, hardware: Hardware, precision: Precision) -> Floats:
    """Seconds of each kernel alone on the device, one after the other. On a CPU without what is spent around operators.

    Raises
    ------
    ValueError
        If the hardware's speeds or the peak of a format are unknown.
    """
    speeds = hardware.speeds
    if speeds is None or hardware.memory_bandwidth_gb_s is None:
        raise ValueError(f"hardware={hardware.name} has no speeds: time cannot be predicted")
    bandwidth = hardware.memory_bandwidth_gb_s * 1e9 * speeds.memory_efficiency
    shares = np.array([_share(*each, speeds) for each in zip(kernels.operators, kernels.formats, strict=True)])
    seconds = kernels.bytes_moved / (bandwidth * shares)
    if speeds.processor is not None:
        computing = computing_seconds(kernels, hardware, precision)
        return np.where(kernels.kinds == MEMORY, seconds, computing) + speeds.launch.kernel_us * 1e-6
    return np.maximum(seconds, _computing(kernels, hardware, precision)) + speeds.launch.kernel_us * 1e-6


def _computing(kernels: Kernels, hardware: Hardware, precision: Precision) -> Floats:
    """Seconds of arithmetic on a GPU, for kernels that wait for nothing else."""
    speeds = hardware.speeds
    assert speeds is not None
    assert speeds.attention is not None
    computing = np.zeros(len(kernels))
    matmuls, attention = kernels.kinds == MATMUL, kernels.kinds == ATTENTION
    for number, name in enumerate(FORMATS):
        if np.any(here := matmuls & (kernels.formats == number)):
            peak, efficiency = _peak(name, hardware, speeds, precision)
            computing[here] = matmul_seconds(kernels.dims[here, :4], peak * efficiency, speeds)
    if np.any(attention):
        # Its operands are of two formats: one number per row of scores is kept in fp32, whatever it computes in.
        peak, _ = _peak(precision.compute, hardware, speeds, precision)
        backward = np.array(["backward" in operator for operator in kernels.operators])[attention]
        share = np.where(backward, speeds.attention.backward, speeds.attention.forward)
        width = kernels.dims[attention, 4]
        slowed = (HEAD_DIMENSIONS * np.ceil(width / HEAD_DIMENSIONS) + speeds.attention.half_width) / width
        computing[attention] = kernels.flops[attention] * slowed / (peak * share)
    return computing


def matmul_seconds(shapes: Floats, flops_per_s: float, speeds: Speeds) -> Floats:
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
    assert speeds.matmul is not None
    batch, m, n, k = (column[:, None] for column in shapes.T)
    per_block = flops_per_s / speeds.matmul.multiprocessors
    splits = np.array(SPLITS)[None, :]
    best = np.full(len(shapes), np.inf)
    for rows, columns, share in TILES:
        blocks = batch * np.ceil(m / rows) * np.ceil(n / columns) * splits
        waves = np.ceil(blocks / speeds.matmul.multiprocessors)
        each = 2 * rows * columns * (k / splits + speeds.matmul.half_depth * (1 + (splits > 1)))
        best = np.minimum(best, np.min(waves * each / (per_block * share), axis=1))
    return best


def _peak(name: str, hardware: Hardware, speeds: Speeds, precision: Precision) -> tuple[float, float]:
    """FLOP/s on paper and the share of it large matrix products reach, for operands in a format."""
    peak_name = "tf32" if name == "fp32" and precision.tf32 else "fp32" if name == "other" else name
    assert speeds.matmul is not None
    peak, efficiency = hardware.peak_tflops.get(peak_name), speeds.matmul.efficiency.get(peak_name)
    if peak is None or efficiency is None:
        raise ValueError(f"hardware={hardware.name} has no speed for {peak_name}")
    return peak * 1e12, efficiency


def _share(operator: str, format_: int, speeds: Speeds) -> float:
    """Share of the elementwise kernels' bandwidth that an operator reaches."""
    name = operator.removeprefix("aten.").removeprefix("aten::").split(".")[0]
    measured = SLOW if speeds.operators is None else speeds.operators
    return measured.get(operator_key(name, FORMATS[format_]), measured.get(name, 1.0))


def operator_key(name: str, format_: str) -> str:
    """What `Speeds.operators` calls an operator on operands of a format."""
    return f"{name} {format_}" if format_ in NARROW else name
