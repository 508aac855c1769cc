"""Kernels and collectives cost what physics allows: never faster than the peak or the link, never less for more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.core.precision import Precision
from bench.hardware import Hardware
from bench.hardware.attention_kernels import choose_sdpa_kernel
from bench.hardware.speeds import LinkSpeeds
from bench.prediction.cost.attention import compute_attention_seconds
from bench.prediction.cost.collectives import (
    ALL_TO_ALL,
    CALIBRATED_COLLECTIVES,
    CollectiveGroup,
    compute_bus_bandwidth,
    compute_collective_seconds,
    compute_send_seconds,
)
from bench.prediction.cost.kernels import compute_kernel_seconds
from bench.prediction.trace.kernels import (
    ATTENTION,
    BIAS_SUFFIX,
    MATMUL,
    MEMORY_BOUND,
    NUM_DIMS,
    OPERAND_FORMATS,
    KernelArrays,
)
from tests.conftest import compose_run_config

A100 = compose_run_config("hardware=a100_80gb").hardware
H100 = compose_run_config("hardware=h100_80gb").hardware
BF16 = compose_run_config("hardware=a100_80gb", "precision=bf16").precision
TF32 = compose_run_config("hardware=a100_80gb", "precision=tf32").precision
FP32 = compose_run_config("hardware=a100_80gb", "precision=fp32").precision
MIB = 2**20


def links(hardware: Hardware = A100, **changed: float) -> LinkSpeeds:
    assert hardware.speeds is not None
    return dataclasses.replace(hardware.speeds.links, **changed)  # type: ignore[arg-type]


def matmuls(shapes: list[tuple[int, int, int, int]], format_: str = "bf16", row_bytes: int = 16) -> KernelArrays:
    batch, m, n, k = (np.array(column, dtype=float) for column in zip(*shapes, strict=True))
    width = 4 if format_ == "fp32" else 2
    return KernelArrays(
        operators=("mm",) * len(shapes),
        kinds=np.full(len(shapes), MATMUL),
        formats=np.full(len(shapes), OPERAND_FORMATS.index(format_)),
        dims=np.stack([batch, m, n, k, 0 * k], axis=1),
        flops=2 * batch * m * n * k,
        bytes_moved=width * batch * (m * k + k * n + m * n),
        row_bytes=np.full(len(shapes), row_bytes),
    )


def make_grouped(operator: str, groups: int, m: int, n: int, k: int, format_: str = "bf16") -> KernelArrays:
    """One operator that multiplies the tokens of each expert, of shapes as the trace has them."""
    return dataclasses.replace(matmuls([(groups, m, n, k)], format_), operators=(operator,), bytes_moved=np.zeros(1))


def compute_grouped_seconds(operator: str, expert_tokens: tuple[int, ...], m: int, n: int, k: int) -> float:
    format_, precision = ("fp32", FP32) if "fallback" in operator else ("bf16", BF16)
    grouped = make_grouped(operator, len(expert_tokens), m, n, k, format_)
    return float(compute_kernel_seconds(grouped, H100, precision, expert_tokens)[0])


ROWS = "_grouped_mm", 512, 4096, 4096
DEPTH = "_grouped_mm.depth", 4096, 4096, 512
ONE_BY_ONE = "grouped_mm_fallback", 512, 4096, 4096


@pytest.mark.parametrize(("operator", "m", "n", "k"), [ROWS, DEPTH])
def test_even_experts_cost_what_a_batch_of_equal_products_costs(operator: str, m: int, n: int, k: int) -> None:
    batch = compute_kernel_seconds(make_grouped(operator, 8, m, n, k), H100, BF16)[0]
    assert compute_grouped_seconds(operator, (512,) * 8, m, n, k) == pytest.approx(batch)


@pytest.mark.parametrize(("operator", "m", "n", "k"), [ROWS, DEPTH, ONE_BY_ONE])
def test_uneven_experts_cost_more_and_their_order_does_not_matter(operator: str, m: int, n: int, k: int) -> None:
    even = compute_grouped_seconds(operator, (512,) * 8, m, n, k)
    uneven_tokens = (400, 430, 460, 490, 520, 550, 590, 656)
    uneven = compute_grouped_seconds(operator, uneven_tokens, m, n, k)
    assert sum(uneven_tokens) == 8 * 512
    assert even < uneven < 1.5 * even
    assert compute_grouped_seconds(operator, uneven_tokens[::-1], m, n, k) == pytest.approx(uneven)


@pytest.mark.parametrize(("operator", "m", "n", "k"), [ROWS, DEPTH])
def test_a_rank_with_some_of_the_experts_takes_as_long_as_for_those(operator: str, m: int, n: int, k: int) -> None:
    """Two of eight, each of which has as many tokens."""
    own = compute_kernel_seconds(make_grouped(operator, 2, m, n, k), H100, BF16, (512,) * 2)[0]
    assert compute_kernel_seconds(make_grouped(operator, 2, m, n, k), H100, BF16, (512,) * 8)[0] == pytest.approx(own)


def test_every_experts_rows_are_rounded_up_to_whole_tiles() -> None:
    """Of 128 rows: 8 experts with 4 tiles each are 32 tiles, with a row more each they are 40, of 16 columns of tiles;
    in waves of 132 multiprocessors 4 and 5."""
    launch_s = H100.speeds.launch.kernel_us * 1e-6  # type: ignore[union-attr]
    full, more = (
        compute_grouped_seconds("_grouped_mm", (rows,) * 8, rows, 4096, 4096) - launch_s for rows in (512, 513)
    )
    assert more / full == pytest.approx(5 / 4)


def test_the_expert_with_most_tokens_holds_up_the_gradient_of_weights() -> None:
    spread = compute_grouped_seconds("_grouped_mm.depth", (512,) * 8, 128, 256, 512)
    all_in_one = compute_grouped_seconds("_grouped_mm.depth", (4096, *(0,) * 7), 128, 256, 512)
    assert all_in_one > 4 * spread


def test_without_experts_nothing_depends_on_them() -> None:
    kernels = matmuls([(8, 512, 4096, 4096), (1, 100, 200, 300)])
    assert (compute_kernel_seconds(kernels, H100, BF16, (1, 2, 3)) == compute_kernel_seconds(kernels, H100, BF16)).all()


def others(operator: str, bytes_moved: float, kind: int = MEMORY_BOUND, flops: float = 0.0) -> KernelArrays:
    return KernelArrays(
        operators=(operator,),
        kinds=np.array([kind]),
        formats=np.array([OPERAND_FORMATS.index("bf16")]),
        dims=np.array([[1, 16, 2048, 2048, 128]], dtype=float) if kind == ATTENTION else np.zeros((1, NUM_DIMS)),
        flops=np.array([flops]),
        bytes_moved=np.array([bytes_moved]),
        row_bytes=np.zeros(1, dtype=np.int64),
    )


def seconds(kernels: KernelArrays, hardware: Hardware = A100, precision: Precision = BF16) -> np.ndarray:
    return compute_kernel_seconds(kernels, hardware, precision)


SIZES = np.unique(np.round(2 ** np.linspace(4, 15, 23)).astype(int))


@pytest.mark.parametrize("hardware", [A100, H100], ids=["a100", "h100"])
@pytest.mark.parametrize("format_", ["fp32", "bf16", "fp16"])
def test_no_kernel_beats_the_peak_or_the_memory(hardware: Hardware, format_: str) -> None:
    assert hardware.memory_bandwidth_gb_s is not None
    rng = np.random.default_rng(0)
    shapes = [tuple(int(x) for x in (rng.integers(1, 64), *rng.choice(SIZES, 3))) for _ in range(300)]
    kernels = matmuls(shapes, format_)  # type: ignore[arg-type]
    for precision, peak in ((FP32, "fp32"), (TF32, "tf32")) if format_ == "fp32" else ((BF16, format_),):
        took = seconds(kernels, hardware, precision)
        assert (kernels.flops / took < hardware.peak_tflops[peak] * 1e12).all()
        assert (kernels.bytes_moved / took < hardware.memory_bandwidth_gb_s * 1e9).all()


def test_a_larger_product_never_takes_less() -> None:
    for axis in range(4):
        shapes = [tuple(int(size) if axis == place else 512 for place in range(4)) for size in SIZES]
        took = seconds(matmuls(shapes))  # type: ignore[arg-type]
        assert (np.diff(took) >= -1e-12).all(), axis


def lift_power_limit(hardware: Hardware) -> Hardware:
    assert hardware.speeds is not None
    matmul = dataclasses.replace(hardware.speeds.matmul, sustained_share={})
    return dataclasses.replace(hardware, speeds=dataclasses.replace(hardware.speeds, matmul=matmul))


def test_a_large_product_reaches_the_stated_share_of_the_peak() -> None:
    assert A100.speeds is not None
    took = seconds(matmuls([(1, 16384, 12288, 12288)]))[0]
    reached = 2 * 16384 * 12288 * 12288 / took / (A100.peak_tflops["bf16"] * 1e12)
    matmul = A100.speeds.matmul
    lasting_share = matmul.efficiency["bf16"] * matmul.sustained_share["bf16"]
    assert reached == pytest.approx(lasting_share * A100.speeds.many_gpus_share, rel=0.03)
    burst = seconds(matmuls([(1, 16384, 12288, 12288)]), lift_power_limit(A100))[0]
    assert took / burst == pytest.approx(1 / matmul.sustained_share["bf16"], rel=0.001)


def test_a_wave_that_is_not_full_takes_longer_than_its_work() -> None:
    assert A100.speeds is not None
    assert A100.speeds.matmul.multiprocessors == 12 * 9
    full, one_row_more = seconds(matmuls([(1, 12 * 256, 9 * 128, 8192), (1, 12 * 256 + 1, 9 * 128, 8192)]))
    assert one_row_more > 1.2 * full


def test_products_whose_rows_are_not_aligned_are_slower_on_tensor_cores_alone() -> None:
    shape = [(1, 8192, 14336, 51136)]
    bursts = lift_power_limit(A100)
    aligned = seconds(matmuls(shape), bursts)[0]
    assert A100.speeds is not None
    assert A100.speeds.matmul is not None
    shares = A100.speeds.matmul.unaligned_share
    assert 0.3 < shares["2"] < shares["4"] < 0.8, "51137 to 76, 51138 to 137 of 255 TFLOP/s: EleutherAI's cookbook"
    for row_bytes in (2, 4, 8):
        slower = seconds(matmuls(shape, row_bytes=row_bytes), bursts)[0]
        assert slower == pytest.approx(aligned / shares[str(row_bytes)], rel=0.01)
        assert seconds(matmuls(shape, "fp32", row_bytes)) == seconds(matmuls(shape, "fp32"))
    tf32_seconds = [seconds(matmuls(shape, "fp32", row_bytes), bursts, TF32)[0] for row_bytes in (4, 8, 16)]
    assert tf32_seconds[2] / np.array(tf32_seconds) == pytest.approx([shares["4"], shares["8"], 1.0], rel=0.01)
    assert seconds(matmuls(shape, row_bytes=0), bursts)[0] == aligned, "what is not known is taken to be aligned"
    kept_up = seconds(matmuls(shape, row_bytes=2))[0]
    assert kept_up == seconds(matmuls(shape, row_bytes=2), bursts)[0], "so slow that the power limit takes nothing"


def test_attention_in_fp32_is_as_fast_as_an_h100_ran_it() -> None:
    """GPT-1.3B, 4 x 2048 tokens: of 24 blocks forward takes 41.1 ms and backward 129.1 (h100_profiled_totals.csv)."""
    assert H100.speeds is not None
    lone = dataclasses.replace(H100, speeds=dataclasses.replace(H100.speeds, many_gpus_share=1.0))
    dims, causal = (4, 16, 2048, 2048, 128), 0.5
    flops = causal * 2 * float(np.prod(dims))
    for operator, num_matmuls, measured_ms in (("attention_forward", 2, 41.1), ("attention_backward", 5, 129.1)):
        kernel = dataclasses.replace(
            others(operator, 0.0, ATTENTION, num_matmuls * flops), dims=np.array([dims], dtype=float)
        )
        for precision in (FP32, TF32):
            assert 24e3 * seconds(kernel, lone, precision)[0] == pytest.approx(measured_ms, rel=0.05)
        assert seconds(kernel, lone)[0] < seconds(kernel, lone, TF32)[0] / 8, "cuDNN's, in 16 bits"


def test_tf32_is_faster_than_fp32_and_slower_than_bf16() -> None:
    shape = [(1, 8192, 8192, 8192)]
    fp32 = seconds(matmuls(shape, "fp32"), precision=FP32)[0]
    tf32 = seconds(matmuls(shape, "fp32"), precision=TF32)[0]
    assert fp32 > 4 * tf32
    assert tf32 > 1.5 * seconds(matmuls(shape))[0]


def test_elementwise_kernels_take_their_bytes_over_the_bandwidth() -> None:
    assert A100.speeds is not None
    launch = A100.speeds.launch.kernel_us * 1e-6
    took = seconds(others("mul", 2e9))[0] - launch
    assert took == pytest.approx(1e-3 / A100.speeds.memory_efficiency, rel=1e-6)  # 2 GB at 2,000 GB/s
    assert seconds(others("mul", 1))[0] == pytest.approx(launch, rel=0.01)
    assert seconds(others("embedding_dense_backward", 2e9))[0] > 3 * took


def test_attention_backward_is_slower_per_flop_than_forward() -> None:
    flops = 1e12
    forward = seconds(others("attention_forward", 0, ATTENTION, flops))[0]
    backward = seconds(others("attention_backward", 0, ATTENTION, flops))[0]
    assert flops / 312e12 < forward < backward


def time_attention(
    hardware: Hardware, shape: tuple[int, int, int, int, int], *, causal: bool = True, operator: str = "attention"
) -> float:
    """Seconds that fused attention of a shape (batch, heads, queries, keys, head dimension) takes forward."""
    dims = np.array([shape], dtype=float)
    flops = 4 * dims.prod(axis=1) / (2 if causal else 1)
    assert hardware.speeds is not None
    assert hardware.speeds.attention is not None
    return float(compute_attention_seconds([operator], dims, flops, 989e12, hardware.speeds.attention, 132)[0])


def test_attention_takes_longer_per_flop_where_heads_are_narrow_sequences_short_and_blocks_few() -> None:
    narrow, wide = time_attention(H100, (8, 32, 4096, 4096, 64)), time_attention(H100, (8, 16, 4096, 4096, 128))
    assert 1.1 * wide < narrow < 2 * wide, "as many FLOPs"
    short, long = time_attention(H100, (64, 16, 512, 512, 128)), time_attention(H100, (8, 16, 4096, 4096, 128))
    assert short > 1.2 * long / 8, "an eighth of the FLOPs"
    assert time_attention(H100, (8, 16, 4096, 4096, 80)) == pytest.approx(
        time_attention(H100, (8, 16, 4096, 4096, 96)), rel=0.001
    ), "narrower heads are padded"
    square = time_attention(H100, (8, 16, 4096, 4096, 128), causal=False)
    assert 0.5 * square < long < 0.6 * square
    assert time_attention(H100, (1, 1, 4096, 4096, 128)) > 2 * time_attention(H100, (8, 16, 4096, 4096, 128)) / 128


def test_the_kernel_of_attention_is_the_one_that_torch_picks() -> None:
    hopper, ampere, volta = ("cudnn", "flash3", "flash2", "efficient"), ("flash2", "efficient"), ("efficient",)
    assert [choose_sdpa_kernel(kernels) for kernels in (hopper, ampere, volta)] == ["cudnn", "flash2", "efficient"]
    assert choose_sdpa_kernel(hopper, torch_version=(2, 11)) == "cudnn"
    assert choose_sdpa_kernel(hopper, torch_version=(2, 9)) == "flash2"
    assert choose_sdpa_kernel(hopper, torch_version=(2, 5, 0)) == "cudnn"
    assert choose_sdpa_kernel(hopper, torch_version=(2, 5, 1)) == "flash2"
    assert choose_sdpa_kernel(ampere, has_bias=True) == "efficient"
    assert choose_sdpa_kernel(hopper, has_bias=True) == "cudnn"
    assert choose_sdpa_kernel(hopper, has_bias=True, learns_bias=True) == "efficient"
    assert choose_sdpa_kernel(("sdpa", *hopper)) == "sdpa", "whatever ran where it was timed"
    with pytest.raises(ValueError, match="none of the attention kernels flash3"):
        choose_sdpa_kernel(("flash3",))


def test_a_bias_and_a_kernel_by_name_change_the_time_of_attention() -> None:
    shape = (8, 16, 4096, 4096, 128)
    assert time_attention(A100, shape, operator=f"attention{BIAS_SUFFIX}") > 1.3 * time_attention(A100, shape)
    named = compose_run_config("hardware=a100_80gb", "hardware.speeds.attention.kernel=triton_2022").hardware
    assert time_attention(named, shape) == pytest.approx(1.8 * time_attention(A100, shape), rel=0.02)


def test_a_v100_has_no_speed_for_bf16() -> None:
    v100 = compose_run_config("hardware=v100_16gb", "precision=fp16").hardware
    with pytest.raises(ValueError, match="no speed for bf16"):
        seconds(matmuls([(1, 64, 64, 64)]), v100)
    with pytest.raises(ValueError, match="time cannot be predicted"):
        seconds(matmuls([(1, 64, 64, 64)]), compose_run_config("hardware=gpu").hardware)


NODE, CLUSTER = CollectiveGroup(8, 8), CollectiveGroup(64, 8)
REPLICAS = CollectiveGroup(8, 1, concurrent_groups=8)


@pytest.mark.parametrize("kind", CALIBRATED_COLLECTIVES)
@pytest.mark.parametrize(
    "group", [NODE, CLUSTER, REPLICAS, CollectiveGroup(2, 8), CollectiveGroup(16, 16), CollectiveGroup(512, 8)]
)
def test_no_collective_beats_its_narrowest_link(kind: str, group: CollectiveGroup) -> None:
    for size in 10.0 ** np.arange(1, 11):
        bus = compute_bus_bandwidth(kind, size, group, links())
        gain = links().gpu_all_reduce if kind == "all-reduce" and group.nodes == 1 else 1.0
        assert 0 < bus <= links().gpu_gb_s * links().gpu_efficiency * gain * 1.0001
        if group.nodes > 1:
            # A tree all-reduce moves no more than its data, where the bus bandwidth is that of a ring.
            assert bus <= links().node_gb_s / group.concurrent_groups


@pytest.mark.parametrize("kind", CALIBRATED_COLLECTIVES)
def test_more_bytes_more_ranks_and_more_nodes_never_take_less(kind: str) -> None:
    sizes = [compute_collective_seconds(kind, size, CLUSTER, links()) for size in 2.0 ** np.arange(4, 36)]
    assert (np.diff(sizes) >= 0).all()
    within = [compute_collective_seconds(kind, 100 * MIB, CollectiveGroup(n, 8), links()) for n in (2, 4, 8)]
    across = [
        compute_collective_seconds(kind, 100 * MIB, CollectiveGroup(n, 8), links())
        for n in (16, 32, 64, 128, 512, 4096, 16384)
    ]
    assert (np.diff(within + across) >= 0).all()
    sharing = [compute_collective_seconds(kind, 100 * MIB, CollectiveGroup(8, 1, n), links()) for n in (1, 2, 8, 16)]
    assert (np.diff(sharing) >= 0).all()


def test_one_rank_communicates_with_nobody() -> None:
    assert compute_collective_seconds("all-reduce", 1e9, CollectiveGroup(1, 1), links()) == 0.0


def test_large_collectives_reach_what_nccl_tests_print() -> None:
    # https://github.com/stas00/ml-engineering/tree/master/network: 235 of 300 GB/s in an A100 node
    assert compute_bus_bandwidth("all-reduce", 4e9, NODE, links()) == pytest.approx(235, rel=0.02)
    # https://github.com/NVIDIA/nccl/issues/986: 350 of 450 GB/s in an H100 node
    assert compute_bus_bandwidth("all-gather", 4e9, NODE, links(H100)) == pytest.approx(350, rel=0.03)


def test_a_group_of_fewer_gpus_has_its_own_share_of_the_bandwidth() -> None:
    shared = links(gpu_group_share={"2": 0.5, "4": 0.8, "8": 1.0})  # type: ignore[arg-type]
    whole = compute_bus_bandwidth("all-gather", 8e9, NODE, shared)
    ratio = {n: compute_bus_bandwidth("all-gather", 8e9, CollectiveGroup(n, n), shared) / whole for n in (2, 3, 4, 16)}
    assert (ratio[2], ratio[4]) == (pytest.approx(0.5, rel=0.01), pytest.approx(0.8, rel=0.01))
    assert 0.5 < ratio[3] < 0.8
    assert ratio[16] == pytest.approx(1.0, rel=0.01), "beyond what was timed as the largest"


def test_an_all_gather_among_many_nodes_reaches_what_was_measured() -> None:
    # https://github.com/NVIDIA/nccl/issues/1218: 2 GB among 256 H100
    assert compute_bus_bandwidth("all-gather", 2 * 2**30, CollectiveGroup(256, 8), links(H100)) == pytest.approx(
        200, rel=0.05
    )


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_for_large_messages() -> None:
    whole = compute_collective_seconds("all-reduce", 10e9, CLUSTER, links())
    halves = [compute_collective_seconds(kind, 10e9, CLUSTER, links()) for kind in ("reduce-scatter", "all-gather")]
    assert whole == pytest.approx(sum(halves), rel=0.02)


def test_small_collectives_are_bound_by_latency_and_take_the_protocol_for_it() -> None:
    one, two = (compute_collective_seconds("all-gather", size, CLUSTER, links()) for size in (64, 128))
    assert two == pytest.approx(one, rel=1e-3)
    assert one < 500e-6


def test_gathers_of_few_elements_are_inefficient() -> None:
    """The FSDP paper, Figure 2(b) and its text: below 33M elements the time of the same volume rises."""
    pair = CollectiveGroup(16, 8)
    volume = 2**30
    total = [
        volume / size * compute_collective_seconds("all-gather", 4 * size, pair, links())
        for size in 2.0 ** np.arange(18, 30)
    ]
    assert (np.diff(total) <= 0).all()
    assert total[-5] < 1.5 * total[-1]  # 33M elements
    assert total[-10] > 3 * total[-1]  # 1M elements


def test_a_slow_network_slows_what_crosses_nodes_and_nothing_else() -> None:
    slow = links(node_gb_s=12.5)
    assert compute_collective_seconds("all-gather", 1e9, NODE, slow) == compute_collective_seconds(
        "all-gather", 1e9, NODE, links()
    )
    assert compute_collective_seconds("all-gather", 1e9, CLUSTER, slow) > 10 * compute_collective_seconds(
        "all-gather", 1e9, CLUSTER, links()
    )


def test_congestion_grows_with_the_number_of_nodes() -> None:
    congested, free = links(congestion=0.1, gpu_gb_s=900), links(congestion=0.0, gpu_gb_s=900)
    ratio = {
        nodes: compute_collective_seconds("all-gather", 10e9, CollectiveGroup(8 * nodes, 8), congested)
        / compute_collective_seconds("all-gather", 10e9, CollectiveGroup(8 * nodes, 8), free)
        for nodes in (2, 4, 64)
    }
    assert ratio[2] == pytest.approx(1.0)
    assert ratio[4] == pytest.approx(1.1, rel=0.01)
    assert ratio[64] == pytest.approx(1.5, rel=0.05)


def test_eight_groups_that_share_the_adapters_each_get_an_eighth() -> None:
    alone = compute_collective_seconds("all-reduce", 1e9, CollectiveGroup(8, 8), links())
    replicas = compute_collective_seconds("all-reduce", 1e9, REPLICAS, links())
    assert replicas > alone
    assert compute_bus_bandwidth("all-reduce", 4e9, REPLICAS, links()) <= links().node_gb_s / 8


def test_sends_reach_a_share_of_the_line_rate_of_their_own() -> None:
    size, fabric = 1e9, links(latency=1.0)
    slow, even = links(latency=1.0, node_efficiency=0.1), links(latency=1.0, node_efficiency=0.1, send_efficiency=0.9)
    node_bytes_per_s = 1e9 * fabric.node_gb_s
    for concurrent_sends in (fabric.adapters, 2 * fabric.adapters):
        seconds = compute_send_seconds(size, even, is_in_node=False, concurrent_sends=concurrent_sends)
        assert seconds == pytest.approx(concurrent_sends * size / (0.9 * node_bytes_per_s), rel=0.02)
        slow_s = compute_send_seconds(size, slow, is_in_node=False, concurrent_sends=concurrent_sends)
        assert slow_s == pytest.approx(9 * seconds, rel=0.02)
    assert compute_collective_seconds("all-reduce", size, CLUSTER, even) == compute_collective_seconds(
        "all-reduce", size, CLUSTER, slow
    )
    in_node = compute_send_seconds(size, slow, is_in_node=True)
    assert in_node == compute_send_seconds(size, even, is_in_node=True) < seconds


def test_an_all_to_all_is_as_fast_as_the_link_that_most_of_it_crosses() -> None:
    size = 256.0 * MIB
    fabric = links(latency=1.0, congestion=0.0)
    link_bytes_per_s, node_bytes_per_s = (
        1e9 * fabric.gpu_gb_s * fabric.gpu_efficiency,
        1e9 * fabric.node_gb_s * fabric.node_efficiency,
    )
    assert compute_collective_seconds(ALL_TO_ALL, size, CollectiveGroup(1, 1), fabric) == 0
    inside = compute_collective_seconds(ALL_TO_ALL, size, CollectiveGroup(8, 8), fabric)
    assert inside == pytest.approx(size * 7 / 8 / link_bytes_per_s, rel=0.03)  # and the time to start
    across = compute_collective_seconds(ALL_TO_ALL, size, CollectiveGroup(32, 8), fabric)
    assert across == pytest.approx(8 * size * 24 / 32 / node_bytes_per_s, rel=0.02)  # of all 8 of a node
    # Rings carry a gathered tensor into a node once, an all-to-all a part for each of its ranks.
    assert across > 4 * compute_collective_seconds("all-gather", size, CollectiveGroup(32, 8), fabric)
    times = [compute_collective_seconds(ALL_TO_ALL, size, CollectiveGroup(n, 8), fabric) for n in (16, 64, 512)]
    assert times == sorted(times)
