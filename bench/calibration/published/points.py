"""Published microbenchmarks as tables: what was timed, in the units of the cost model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from bench.calibration.published.devices import BURST_DEVICES, POINT_BANDWIDTHS_GB_S
from bench.core.installation import DATA_FOLDER
from bench.hardware.attention_kernels import CUDNN, EFFICIENT, FLASH_2, FLASH_3
from bench.hardware.sustained_clocks import POWER_EXPONENT, get_share_at_one_watt
from bench.prediction.trace.kernels import (
    ALIGNED_ROW_BYTES,
    ATTENTION_BACKWARD_MATMULS,
    ATTENTION_FORWARD_MATMULS,
)

POINTS_FOLDER = DATA_FOLDER / "results"
POINTS_FILES = (
    "published/micro.csv",
    "published/micro_attention.csv",
    "published/micro_products.csv",
    "calibration/h200_kernels.csv",
)
"""The last was measured with this suite's other rows of that GPU (results/measured/README.md)."""

SQUARE_OF_A_SWEEP = 8192
"""m, n and k of the largest product in the sweep of mli/transformers-benchmarks."""

MIN_ENGINE_QUERIES = 2048
"""From this length on the attention of an inference engine takes longer than what the engine does around it. Its
timings are left out where the kernel was timed by itself."""

ATTENTION_COLUMNS = [
    *("gpu", "batch", "heads", "queries", "head_dimension", "is_causal", "is_backward"),
    *("kernel", "tflops", "is_engine", "source_url"),
]

MIN_SECONDS_TIMED_AT_LENGTH = 120e-6
"""Below this the timings of SimuMax are the same 90 to 110 us whatever the work: the processor started no kernel
sooner. They say nothing of the GPU and are left out."""

MIN_NORM_WIDTH = 2048
"""Narrower norms are those of heads."""
MIN_PRODUCT_SIZE = 64
"""Smaller products wait for other things than arithmetic."""
HALF_PRECISION_BYTES = 2


@functools.cache
def read_points() -> pd.DataFrame:
    """Every line of the files: gpu, what, size, value, unit, source_url, note."""
    return pd.concat([pd.read_csv(POINTS_FOLDER / name) for name in POINTS_FILES], ignore_index=True)


def select_points(names: Sequence[str], pattern: str) -> pd.DataFrame:
    """Those of some devices whose `what` matches a regular expression."""
    points = read_points()
    return points[points.gpu.isin(list(names)) & points.what.str.contains(pattern)].copy()


def read_burst_products(names: Sequence[str]) -> pd.DataFrame:
    """Products of bf16 in short bursts by shape: columns gpu, batch, m, n, k, tflops."""
    return _parse_shapes(select_points(names, "^matmul bf16$"))


def read_products_by_alignment(names: Sequence[str]) -> pd.DataFrame:
    """Products of a 16-bit format whose layout is known.

    Returns
    -------
    DataFrame
        Columns gpu, batch, m, n, k, tflops; row_bytes: what the rows of both operands and of the result are aligned to,
        at most `ALIGNED_ROW_BYTES`; series: the address of the sweep that they are from.
    """
    points = select_points(names, "^matmul (?:fp16|bf16) [NT][NT]$")
    layouts = points.what.str[-2:].to_numpy()
    shapes = _parse_shapes(points)
    m, n, k = (shapes[dimension].astype(int) for dimension in ("m", "n", "k"))
    # The left operand's rows are k long, the right one's and the result's n; those of a transposed operand m, or k.
    left_rows = np.where(np.char.startswith(layouts.astype(str), "T"), m, k)
    right_rows = np.where(np.char.endswith(layouts.astype(str), "T"), k, n)
    row_lengths = np.gcd(np.gcd(left_rows, right_rows), n)
    shapes["row_bytes"] = np.gcd(HALF_PRECISION_BYTES * row_lengths, ALIGNED_ROW_BYTES)
    shapes["series"] = points.source_url.to_numpy()
    return shapes[shapes[["m", "n", "k"]].min(axis=1) >= MIN_PRODUCT_SIZE].reset_index(drop=True)


def read_sustained_products(names: Sequence[str]) -> pd.DataFrame:
    """Products of bf16 timed at length, in the layouts of training and without adding to what is there."""
    points = select_points(names, "^matmul bf16 in training layouts$")
    return _parse_shapes(points[points["size"].str.contains("accumulate=False")])


def read_best_products(names: Sequence[str], format_: str) -> pd.DataFrame:
    """The fastest product of a search over shapes, or the largest of a sweep: columns as `read_burst_products`."""
    search = select_points(names, rf"^matmul {format_}, maximum achievable")
    search[["m", "n", "k"]] = search["size"].str.extract(r"^(\d+)x(\d+)x(\d+)$").astype(float)
    sweep = select_points(names, "^Matrix Multiplication FP16$" if format_ == "bf16" else "^$")
    sweep[["m", "n", "k"]] = float(SQUARE_OF_A_SWEEP)
    best = search if len(search) else sweep
    return best.assign(batch=1.0, tflops=best.value.astype(float))[["gpu", "batch", "m", "n", "k", "tflops"]]


def read_fp32_tflops(names: Sequence[str]) -> float | None:
    """TFLOP/s of the fastest product in fp32 on CUDA cores; None where none was timed."""
    points = select_points(names, r"^linear fp32 \(CUDA cores\)$")
    return float(points.value.max()) if len(points) else None


def _parse_shapes(points: pd.DataFrame) -> pd.DataFrame:
    for dimension in ("m", "n", "k"):
        points[dimension] = points["size"].str.extract(rf"\b{dimension}=(\d+)")[0].astype(float)
    points["batch"] = points["size"].str.extract(r"\bb=(\d+)")[0].fillna("1").astype(float)
    points["tflops"] = _convert_to_tflops(points)
    return points[["gpu", "batch", "m", "n", "k", "tflops"]].reset_index(drop=True)


def _convert_to_tflops(points: pd.DataFrame) -> pd.Series:
    """Values in TFLOP/s; shares are of the peak that their unit names."""
    peak_tflops = points.unit.str.extract(r"share of (\d+) TFLOPS")[0].astype(float)
    values = points.value.astype(float)
    return values * peak_tflops.fillna(1.0)


def read_attention(names: Sequence[str]) -> pd.DataFrame:
    """Fused attention in short bursts.

    Returns
    -------
    DataFrame
        Columns batch, heads, queries, head_dimension (the mean of queries' and values'), is_causal, is_backward,
        kernel, tflops (half of the square where causal), is_engine: of an inference engine, with its overhead; gpu
        and source_url.
    """
    points = select_points(names, "^attention (?:forward|backward|fwd|bwd) bf16")
    size = points["size"]

    def find(pattern: str) -> pd.Series:
        return size.str.extract(pattern)[0].astype(float)

    points["batch"] = find(r"batch=(\d+)")
    points["queries"] = find(r"(?:seq|seq_len|q_seq)=(\d+)")
    points["heads"] = find(r"(?:heads|head_num)=(\d+)")
    width = find(r"head_dim=(\d+)").fillna(find(r"qk_head_dim=(\d+)"))
    value_width = find(r"head_dim=\d+/(\d+)").fillna(find(r"v_head_dim=(\d+)")).fillna(width)
    points["head_dimension"] = (width + value_width) / 2
    points["is_backward"] = points.what.str.contains("backward|bwd")
    is_timed_at_length = points.unit.str.startswith("share of")
    points["is_causal"] = points.what.str.contains("causal") | size.str.contains("causal|top_left") | is_timed_at_length
    points["is_engine"] = points.source_url.str.contains("aiconfigurator")
    points["kernel"] = _name_kernels(points)
    # The shares count the whole square of scores, of which the causal kernel computes half.
    points["tflops"] = _convert_to_tflops(points) * np.where(is_timed_at_length, 0.5, 1.0)
    num_matmuls = np.where(points.is_backward, ATTENTION_BACKWARD_MATMULS, ATTENTION_FORWARD_MATMULS)
    causal_flops = num_matmuls * points.batch * points.heads * points.queries**2 * points.head_dimension
    is_late_start = is_timed_at_length & (causal_flops / points.tflops / 1e12 < MIN_SECONDS_TIMED_AT_LENGTH)
    for gpu in points.gpu[is_timed_at_length].unique():
        selected = is_timed_at_length & (points.gpu == gpu)
        points.loc[selected, "tflops"] = estimate_attention_burst_tflops(points.tflops[selected], *BURST_DEVICES[gpu])
    is_deterministic = points.note.str.contains("deterministic backward True") & points.is_backward
    kept = points[(points.kernel != "") & ~is_deterministic & ~is_late_start]
    has_library = kept.kernel.isin(kept.kernel[~kept.is_engine])
    kept = kept[~kept.is_engine | (~has_library & (kept.queries >= MIN_ENGINE_QUERIES))]
    return kept[ATTENTION_COLUMNS].reset_index(drop=True)


def estimate_attention_burst_tflops(sustained_tflops: pd.Series, board_power_w: float, chip: str) -> pd.Series:
    """The bursts of attention that `compute_sustained_share` says were slowed to these speeds."""
    unlimited = get_share_at_one_watt(chip, is_attention=True) * board_power_w**POWER_EXPONENT
    return np.maximum(sustained_tflops, (sustained_tflops / unlimited) ** (1 / (1 - POWER_EXPONENT)))


def _name_kernels(points: pd.DataFrame) -> pd.Series:
    """Kernel of each point, empty where it cannot be told or is an old one (that of TensorRT-LLM on A100)."""
    named = points.note.str.extract(r"^kernel (\w+)")[0]
    is_blackwell = points.gpu.str.contains("B200|B300")
    is_graphics = points.gpu.str.contains("L40S|RTX")
    is_timed_at_length = points.unit.str.startswith("share of")
    is_flash_3 = points.gpu.str.startswith("H") & points.note.str.contains("fa3")
    choices = [named.notna(), points.note.str.contains("backend cudnn") | (is_timed_at_length & is_blackwell)]
    choices += [is_timed_at_length, points.is_engine & is_blackwell, points.is_engine & is_graphics, is_flash_3]
    kernels = np.select(choices, [named.fillna(""), CUDNN, FLASH_2, CUDNN, FLASH_2, FLASH_3], default="")
    return pd.Series(kernels, index=points.index)


def read_efficient_ratios() -> tuple[float, float]:
    """Speed of the memory-efficient kernel forward and backward as a multiple of FlashAttention-2's, on one GPU."""
    points = read_attention(["GPU not named (issue 416)"])
    mean_logs = np.log(points.tflops).groupby([points.kernel, points.is_backward]).mean()
    forward, backward = (
        float(np.exp(mean_logs[EFFICIENT, is_backward] - mean_logs[FLASH_2, is_backward]))
        for is_backward in (False, True)
    )
    return forward, backward


def read_collectives(name: str) -> pd.DataFrame:
    """Collectives inside a node: columns kind, ranks, size_bytes, seconds."""
    points = select_points([name], r"busbw, \d GPUs, one node")
    points[["kind", "ranks"]] = points.what.str.extract(r"^(\w+) busbw, (\d)")
    points["kind"] = points.kind.str.replace("_", "-")
    points["ranks"] = points.ranks.astype(int)
    points["size_bytes"] = points["size"].str.extract(r"(\d+)")[0].astype(float)
    passes = np.where(points.kind == "all-reduce", 2, 1)
    points["seconds"] = passes * points.size_bytes * (1 - 1 / points.ranks) / points.value.astype(float) / 1e9
    return points[["kind", "ranks", "size_bytes", "seconds"]].reset_index(drop=True)


def read_best_bandwidth_shares(names: Sequence[str]) -> list[float]:
    """Shares of the bandwidth on paper that the best elementwise kernels and copies reached."""
    points = select_points(names, "^elementwise|^device-local copy")
    bandwidths_gb_s = points.gpu.map(POINT_BANDWIDTHS_GB_S).astype(float)  # of no rows pyarrow makes texts
    return (points.value.astype(float) / bandwidths_gb_s).tolist()


def read_streaming_norms(names: Sequence[str]) -> pd.DataFrame:
    """Forward passes of RMSNorm that one fused kernel carries out (torch.compile's, cuDNN's): bytes, seconds."""
    points = select_points(names, "^rms_norm fwd bandwidth, (?:torch_compile|cudnn)")
    shapes = points["size"].str.extract(r"N=(\d+) C=(\d+)").astype(float)
    points["bytes"] = 2 * HALF_PRECISION_BYTES * shapes[0] * shapes[1]  # read and written once
    points["seconds"] = points.bytes / points.value.astype(float) / 1e9
    return points.loc[shapes[1] >= MIN_NORM_WIDTH, ["bytes", "seconds"]].reset_index(drop=True)


def read_norm_bandwidths(names: Sequence[str]) -> dict[str, float]:
    """Median GB/s of PyTorch's own norms, by the name of the operator."""
    operators = {
        "native_layer_norm": "^layer_norm fwd bandwidth, pytorch",
        "native_layer_norm_backward": "^layer_norm bwd bandwidth, pytorch",
        "_fused_rms_norm": "^rms_norm fwd bandwidth, pytorch",
        "_fused_rms_norm_backward": "^rms_norm bwd bandwidth, pytorch",
    }
    bandwidths = {}
    for operator, pattern in operators.items():
        points = select_points(names, pattern)
        columns = points["size"].str.extract(r"C=(\d+)")[0].astype(float)
        wide = points[columns >= MIN_NORM_WIDTH]
        if len(wide):
            bandwidths[operator] = float(wide.value.astype(float).median())
    return bandwidths
