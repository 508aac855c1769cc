"""How fast a device and its links really are: what turns a trace and a plan into seconds.

Every number of ``conf/hardware`` has its source in the same file, or says which published rows it was fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bench.errors import bad_value
from bench.hardware.processor import Processor
from bench.typed import OneOf, Within

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")

SHARE = Within(1e-6, 1)
"""Of a peak."""
MULTIPLE = Within(1e-6, 1e6)
MICROSECONDS = Within(1e-6, 1e7, unit="microseconds")
BANDWIDTH = Within(1e-6, 1e6, unit="GB/s")


@dataclass(frozen=True)
class Matmul:
    """Matrix products on dense operands."""

    efficiency: dict[Annotated[str, OneOf(*FORMATS)], Annotated[float, SHARE]]
    """Share of the dense peak that large products reach while training, per format (fp32, tf32, bf16, fp16, fp8)."""
    multiprocessors: Annotated[int, Within(1, 100_000)]
    """Streaming multiprocessors: thread blocks that compute at once, for wave quantisation."""
    half_depth: Annotated[float, MULTIPLE]
    """Inner dimension k at which a thread block starts and ends as long as it multiplies: half the speed."""
    workspace_mib: Annotated[float, MULTIPLE] = 8.125
    """MiB of the caching allocator that cuBLAS has per handle and stream: PyTorch gives it 2 x 4 MiB and 8 x 16 KiB,
    and 32 MiB from compute capability 9.0 on."""


@dataclass(frozen=True)
class Attention:
    """Fused attention kernels: share of the dense peak that the products they compute reach, were they alone."""

    forward: Annotated[float, SHARE]
    backward: Annotated[float, SHARE]
    half_width: Annotated[float, MULTIPLE]
    """Head dimension at which the exponential and its like take as long as the products: half that speed."""


@dataclass(frozen=True)
class Launch:
    """What starting work takes, in microseconds."""

    kernel_us: Annotated[float, MICROSECONDS]
    """On the device: the shortest time from one kernel's start to the next one's. On a CPU what the call of an operator
    takes however little there is to do."""
    operator_us: Annotated[float, MICROSECONDS]
    """On the processor: one operator of eager PyTorch, forward, backward or optimizer. On a CPU what is spent around
    its call: Python, autograd, views."""
    unit_us: Annotated[float, MICROSECONDS]
    """On the processor: what FSDP's hooks do around one unit in one pass, collectives included."""


@dataclass(frozen=True)
class Gloo:
    """Collectives of gloo, between processes on processors: rings over TCP, every copy and sum made by a core."""

    step_us: Annotated[float, MICROSECONDS]
    """Latency of one step of a ring, in microseconds."""
    reduce: Annotated[float, MULTIPLE]
    """Time per byte of an all-reduce, as a multiple of an all-gather's: cores add what they receive."""
    reduce_scatter: Annotated[float, MULTIPLE]
    """The same of a reduce-scatter, which PyTorch has gloo carry out as an all-reduce of a copy."""


@dataclass(frozen=True)
class Links:
    """Between GPUs of a node, and between nodes. GB are 10^9 bytes."""

    gpu_gb_s: Annotated[float, BANDWIDTH]
    """Of one GPU to the others of its node, one direction, as its vendor gives it."""
    gpu_efficiency: Annotated[float, SHARE]
    """Share of it that large collectives reach."""
    node_gb_s: Annotated[float, BANDWIDTH]
    """Of all network adapters of a node, one direction, line rate."""
    node_efficiency: Annotated[float, SHARE]
    """Share of it that large collectives reach between two nodes."""
    adapters: Annotated[int, Within(1, 1024)]
    """Network adapters per node: a group with one rank per node reaches one of them."""
    congestion: Annotated[float, Within(0, 1000)]
    """Growth of the time on the network with every doubling of the number of nodes, as a share of it."""
    latency: Annotated[float, MULTIPLE]
    """Latency of the steps of a ring that crosses nodes, as a multiple of what NCCL's own model assumes (of a step
    inside a node, where collectives are gloo's)."""
    gpu_latency: Annotated[float, MULTIPLE] = 1.0
    """Latency of a collective inside a node, its start included, as a multiple of what NCCL's own model assumes."""
    gloo: Gloo | None = None
    """Where collectives are gloo's; null where they are NCCL's."""


@dataclass(frozen=True)
class Outside:
    """Device memory, and what of it lies outside PyTorch's allocator, in GiB (2^30 bytes)."""

    device_gib: Annotated[float, Within(1e-3, 1e6, unit="GiB")]
    """What CUDA reports as the device's memory: less than its vendor's number."""
    context_gib: Annotated[float, Within(0, 1e6, unit="GiB")]
    """CUDA's context, the code of the libraries' kernels."""
    communicator_gib: Annotated[float, Within(0, 1e6, unit="GiB")]
    """NCCL's buffers, per process group that communicates."""


@dataclass(frozen=True)
class Speeds:
    """Everything the simulation knows of a device's speed beyond its peaks."""

    matmul: Matmul | None
    """Null where `processor` says it."""
    attention: Attention | None
    """Null where `processor` says it."""
    memory_efficiency: Annotated[float, SHARE]
    """Share of the memory's bandwidth that elementwise kernels reach."""
    overlap_loss: Annotated[float, Within(0, 1, below=True)]
    """Share of its speed that computation loses while a collective runs beside it: the collective's kernels occupy
    multiprocessors and memory."""
    launch: Launch
    links: Links
    outside: Outside
    operators: dict[str, Annotated[float, MULTIPLE]] | None = None
    """Bandwidth an operator reaches as a multiple of what elementwise kernels reach, where it was measured: by the name
    of the operator, or name and format (``tanh bf16``). Null for the rough shares of `bench.simulate.cost.SLOW`."""
    processor: Processor | None = None
    """Of a CPU; null for a GPU."""

    def __post_init__(self) -> None:
        if self.processor is None and (self.matmul is None or self.attention is None):
            missing = "matmul" if self.matmul is None else "attention"
            raise bad_value(f"hardware.speeds.{missing}", None, "numbers, or null beside speeds.processor")
