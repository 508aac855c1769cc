"""How fast a device and its links really are: what turns a trace and a plan into seconds.

Every number of ``conf/hardware`` has its source in the same file, or says which published rows it was fitted on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from bench.core.errors import invalid_value_error
from bench.core.typed_config import OneOf, Within
from bench.hardware.attention_kernels import ATTENTION_KERNELS

NUMBER_FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")

SHARE_BOUNDS = Within(1e-6, 1)
"""Of a peak."""
MULTIPLE_BOUNDS = Within(1e-6, 1e6)
MICROSECOND_BOUNDS = Within(1e-6, 1e7, unit="microseconds")
BANDWIDTH_BOUNDS = Within(1e-6, 1e6, unit="GB/s")


@dataclass(frozen=True)
class MatmulSpeed:
    """Matrix products on dense operands."""

    efficiency: dict[Annotated[str, OneOf(*NUMBER_FORMATS)], Annotated[float, SHARE_BOUNDS]]
    """Share of the dense peak that large products reach in short bursts, per format (fp32, tf32, bf16, fp16, fp8)."""
    multiprocessors: Annotated[int, Within(1, 100_000)]
    """Streaming multiprocessors: thread blocks that compute at once, for wave quantisation."""
    half_depth: Annotated[float, MULTIPLE_BOUNDS]
    """Inner dimension k at which a thread block starts and ends as long as it multiplies: half the speed."""
    workspace_mib: Annotated[float, MULTIPLE_BOUNDS] = 8.125
    """MiB of the caching allocator that cuBLAS has per handle and stream: PyTorch gives it 2 x 4 MiB and 8 x 16 KiB,
    and 32 MiB from compute capability 9.0 on."""
    sustained_share: dict[Annotated[str, OneOf(*NUMBER_FORMATS)], Annotated[float, SHARE_BOUNDS]] = field(
        default_factory=dict
    )
    """Share of the speed of short bursts that products keep up which run alone, for seconds, when the power limit sets
    the clocks (`bench.hardware.sustained_clocks`), per format; 1 where a format is missing."""
    unaligned_share: dict[Annotated[str, OneOf("2", "4", "8")], Annotated[float, SHARE_BOUNDS]] = field(
        default_factory=dict
    )
    """Share of the speed that is left of a product of 16-bit formats where the rows of an operand do not all begin at
    multiples of 16 bytes, by the bytes that they do begin at multiples of; 1 where a number is missing."""

    def compute_reached_share(self, format_: str) -> float | None:
        """Share of the dense peak that large products keep up alone; None where the format is unknown."""
        efficiency = self.efficiency.get(format_)
        return None if efficiency is None else efficiency * self.sustained_share.get(format_, 1.0)


@dataclass(frozen=True)
class AttentionKernelSpeed:
    """One fused attention kernel: share of the dense peak that the products it computes reach, were they alone, the
    heads wide and the sequences long."""

    forward: Annotated[float, SHARE_BOUNDS]
    backward: Annotated[float, SHARE_BOUNDS]
    half_width: Annotated[float, Within(0, 1e6)]
    """Head dimension at which the exponential and its like take as long as the products: half that speed."""
    half_length: Annotated[float, Within(0, 1e6)] = 0.0
    """Keys per query, half of them where attention is causal, at which a thread block starts and ends as long as it
    multiplies: half that speed."""
    sustained_share: Annotated[float, SHARE_BOUNDS] = 1.0
    """As that of matrix products, at the power this kernel draws."""


@dataclass(frozen=True)
class AttentionSpeed:
    """Fused attention kernels."""

    kernels: dict[Annotated[str, OneOf(*ATTENTION_KERNELS)], AttentionKernelSpeed]
    """Those that run on the device, with `bench.hardware.attention_kernels` saying what each is."""
    kernel: Annotated[str, OneOf("auto", *ATTENTION_KERNELS)] = "auto"
    """The one that runs: `auto` for the one that PyTorch's `scaled_dot_product_attention` picks."""


@dataclass(frozen=True)
class LaunchOverhead:
    """What starting work takes, in microseconds."""

    kernel_us: Annotated[float, MICROSECOND_BOUNDS]
    """On the device: the shortest time from one kernel's start to the next one's. On a CPU what the call of an operator
    takes however little there is to do."""
    operator_us: Annotated[float, MICROSECOND_BOUNDS]
    """On the processor: one operator of eager PyTorch, forward, backward or optimizer. On a CPU what is spent around
    its call: Python, autograd, views."""
    unit_us: Annotated[float, MICROSECOND_BOUNDS]
    """On the processor: what FSDP's hooks do around one unit in one pass, collectives included."""


@dataclass(frozen=True)
class GlooSpeed:
    """Collectives of gloo, between processes on processors: rings over TCP, every copy and sum made by a core."""

    step_us: Annotated[float, MICROSECOND_BOUNDS]
    """Latency of one step of a ring, in microseconds."""
    reduce: Annotated[float, MULTIPLE_BOUNDS]
    """Time per byte of an all-reduce, as a multiple of an all-gather's: cores add what they receive."""
    reduce_scatter: Annotated[float, MULTIPLE_BOUNDS]
    """The same of a reduce-scatter, which PyTorch has gloo carry out as an all-reduce of a copy."""


@dataclass(frozen=True)
class LinkSpeeds:
    """Between GPUs of a node, and between nodes. GB are 10^9 bytes."""

    gpu_gb_s: Annotated[float, BANDWIDTH_BOUNDS]
    """Of one GPU to the others of its node, one direction, as its vendor gives it."""
    gpu_efficiency: Annotated[float, SHARE_BOUNDS]
    """Share of it that large collectives reach."""
    node_gb_s: Annotated[float, BANDWIDTH_BOUNDS]
    """Of all network adapters of a node, one direction, line rate."""
    node_efficiency: Annotated[float, SHARE_BOUNDS]
    """Share of it that large collectives reach between two nodes."""
    adapters: Annotated[int, Within(1, 1024)]
    """Network adapters per node: a group with one rank per node reaches one of them."""
    congestion: Annotated[float, Within(0, 1000)]
    """Growth of the time on the network with every doubling of the number of nodes, as a share of it."""
    latency: Annotated[float, MULTIPLE_BOUNDS]
    """Latency of the steps of a ring that crosses nodes, as a multiple of what NCCL's own model assumes (of a step
    inside a node, where collectives are gloo's)."""
    send_efficiency: Annotated[float | None, SHARE_BOUNDS] = None
    """Share of `node_gb_s` that sends from GPUs to GPUs of another node reach; null for `node_efficiency`."""
    gpu_latency: Annotated[float, MULTIPLE_BOUNDS] = 1.0
    """Latency of a collective inside a node, its start included, as a multiple of what NCCL's own model assumes."""
    gpu_group_share: dict[Annotated[str, OneOf("2", "4", "8")], Annotated[float, MULTIPLE_BOUNDS]] | None = None
    """By number of GPUs of a node that take part: bandwidth of large collectives as a multiple of `gpu_efficiency`.
    Null for 1 everywhere; numbers in between are interpolated by their logarithm."""
    gpu_all_reduce: Annotated[float, MULTIPLE_BOUNDS] = 1.0
    """Bus bandwidth of large all-reduces inside a node as a multiple of other collectives': switches from NVLink 4 on
    add up what passes through them."""
    gloo: GlooSpeed | None = None
    """Where collectives are gloo's; null where they are NCCL's."""

    def compute_reached_gb_s(self, num_gpus: int) -> float:
        """GB/s that large collectives reach among so many GPUs of a node, one direction."""
        share, shares = 1.0, self.gpu_group_share
        if shares:
            sizes = sorted(map(int, shares))
            below = max((size for size in sizes if size <= num_gpus), default=sizes[0])
            above = min((size for size in sizes if size >= num_gpus), default=sizes[-1])
            weight = math.log(num_gpus / below) / math.log(above / below) if above > below else 0.0
            share = shares[str(below)] ** (1 - weight) * shares[str(above)] ** weight
        return self.gpu_gb_s * self.gpu_efficiency * share


@dataclass(frozen=True)
class MemoryOutsideAllocator:
    """Device memory, and what of it lies outside PyTorch's allocator, in GiB (2^30 bytes)."""

    device_gib: Annotated[float, Within(1e-3, 1e6, unit="GiB")]
    """What CUDA reports as the device's memory: less than its vendor's number."""
    context_gib: Annotated[float, Within(0, 1e6, unit="GiB")]
    """CUDA's context, the code of the libraries' kernels."""
    communicator_gib: Annotated[float, Within(0, 1e6, unit="GiB")]
    """NCCL's buffers, per process group that communicates."""


MANY_GPUS_SHARE = 0.91
"""What no microbenchmark of one GPU shows: ranks wait for the slowest of them, and collectives take power and
multiprocessors. The one number of kernels that was chosen on training runs, for all devices and formats: with it rows
of llm-foundry and the FSDP paper at 8 to 512 GPUs are as often predicted too fast as too slow."""


@dataclass(frozen=True)
class HardwareSpeeds:
    """Everything the simulation knows of a device's speed beyond its peaks."""

    matmul: MatmulSpeed | None
    """Null where `processor` says it."""
    attention: AttentionSpeed | None
    """Null where `processor` says it."""
    memory_efficiency: Annotated[float, SHARE_BOUNDS]
    """Share of the memory's bandwidth that elementwise kernels reach."""
    overlap_loss: Annotated[float, Within(0, 1, exclusive_maximum=True)]
    """Share of its speed that computation loses while a collective runs beside it: the collective's kernels occupy
    multiprocessors and memory."""
    launch: LaunchOverhead
    links: LinkSpeeds
    outside: MemoryOutsideAllocator
    operators: dict[str, Annotated[float, MULTIPLE_BOUNDS]] | None = None
    """Bandwidth an operator reaches as a multiple of what elementwise kernels reach, where it was measured: by the name
    of the operator, or name and format (``tanh bf16``). Null for the rough shares of `….OPERATOR_BANDWIDTH_SHARES`."""
    processor: ProcessorSpeed | None = None
    """Of a CPU; null for a GPU."""
    many_gpus_share: Annotated[float, SHARE_BOUNDS] = MANY_GPUS_SHARE
    """Share of a lone GPU's speed at matrix products and attention that each has in a run of several."""
    records_nccl_stream: bool = False
    """What FSDP1 gathered is free again only when NCCL has done all it was given, as before torch 2.2, where its stream
    was recorded on what a collective that is waited for at once used (https://github.com/pytorch/pytorch/pull/111431)."""

    def __post_init__(self) -> None:
        if self.processor is None and (self.matmul is None or self.attention is None):
            missing = "matmul" if self.matmul is None else "attention"
            raise invalid_value_error(f"hardware.speeds.{missing}", None, "numbers, or null beside speeds.processor")


# --- How fast a processor is that computes by itself: there the time of an operator is a sum, nothing runs beside it.

TimesByName = dict[str, Annotated[float, Within(0, 1e7, unit="microseconds")]]
RatesByName = dict[str, Annotated[float, Within(1e-6, 1e9)]]


@dataclass(frozen=True)
class ProcessorMatmulSpeed:
    """Matrix products: the sum of a call, of their arithmetic and of the bytes of operands and result, each once.

    Libraries copy one operand into an order of their own: the right one, or the left one if that is transposed.
    """

    call_us: TimesByName
    """Microseconds of a call, beyond what any operator takes."""
    gflops: RatesByName
    """10^9 floating-point operations per second, a multiply-add counting 2."""
    transposed_gflops: RatesByName
    """The same where the left operand is transposed, as in the gradient of a weight."""
    copied_gb_s: RatesByName
    """10^9 bytes per second of the operand that is copied."""
    other_gb_s: RatesByName
    """10^9 bytes per second of the other operand."""
    result_gb_s: RatesByName
    """10^9 bytes per second of the result."""


@dataclass(frozen=True)
class ProcessorAttentionSpeed:
    """Fused attention: the sum of its blocks of queries and of their arithmetic over the whole square of scores."""

    forward_gflops: RatesByName
    """10^9 floating-point operations per second, forward (2 products over the scores)."""
    backward_gflops: RatesByName
    """The same backward (5 products)."""
    forward_block_us: TimesByName
    """Microseconds that starting a block of queries and keys takes, forward."""
    backward_block_us: TimesByName
    """The same backward."""


@dataclass(frozen=True)
class ProcessorOptimizerSpeed:
    """Optimizers' steps; keys are an optimizer and its implementation, as ``adamw fused``."""

    tensor_us: TimesByName
    """Microseconds per tensor that is updated."""
    gb_s: RatesByName
    """10^9 bytes per second, of those that `(module moves; name stays)` counts."""


@dataclass(frozen=True)
class ProcessorSpeed:
    """A processor as a device."""

    products: ProcessorMatmulSpeed
    attention: ProcessorAttentionSpeed
    updates: ProcessorOptimizerSpeed
