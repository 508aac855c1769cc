"""How fast a device and its links really are: what turns a trace and a plan into seconds.

Every number of ``conf/hardware`` has its source in the same file, or says which published rows it was fitted on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bench.errors import bad_value, require_at_least, require_choice
from bench.hardware.processor import Processor

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")
PREFIX = "hardware.speeds"


@dataclass(frozen=True)
class Matmul:
    """Matrix products on dense operands."""

    efficiency: dict[str, float]
    """Share of the dense peak that large products reach while training, per format (fp32, tf32, bf16, fp16, fp8)."""
    multiprocessors: int
    """Streaming multiprocessors: thread blocks that compute at once, for wave quantisation."""
    half_depth: float
    """Inner dimension k at which a thread block starts and ends as long as it multiplies: half the speed."""

    def __post_init__(self) -> None:
        for name, share in self.efficiency.items():
            require_choice(f"{PREFIX}.matmul.efficiency", name, FORMATS)
            _require_share(f"matmul.efficiency.{name}", share)
        require_at_least(f"{PREFIX}.matmul.multiprocessors", self.multiprocessors, 1)
        _require_positive("matmul", self, "half_depth")


@dataclass(frozen=True)
class Attention:
    """Fused attention kernels: share of the dense peak that the products they compute reach, were they alone."""

    forward: float
    backward: float
    half_width: float
    """Head dimension at which the exponential and its like take as long as the products: half that speed."""

    def __post_init__(self) -> None:
        _require_share("attention.forward", self.forward)
        _require_share("attention.backward", self.backward)
        _require_positive("attention", self, "half_width")


@dataclass(frozen=True)
class Launch:
    """What starting work takes, in microseconds."""

    kernel_us: float
    """On the device: the shortest time from one kernel's start to the next one's. On a CPU what the call of an operator
    takes however little there is to do."""
    operator_us: float
    """On the processor: one operator of eager PyTorch, forward, backward or optimizer. On a CPU what is spent around
    its call: Python, autograd, views."""
    unit_us: float
    """On the processor: what FSDP's hooks do around one unit in one pass, collectives included."""

    def __post_init__(self) -> None:
        _require_positive("launch", self, "kernel_us", "operator_us", "unit_us")


@dataclass(frozen=True)
class Gloo:
    """Collectives of gloo, between processes on processors: rings over TCP, every copy and sum made by a core."""

    step_us: float
    """Latency of one step of a ring, in microseconds."""
    reduce: float
    """Time per byte of an all-reduce, as a multiple of an all-gather's: cores add what they receive."""
    reduce_scatter: float
    """The same of a reduce-scatter, which PyTorch has gloo carry out as an all-reduce of a copy."""

    def __post_init__(self) -> None:
        _require_positive("links.gloo", self, "step_us", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Links:
    """Between GPUs of a node, and between nodes. GB are 10^9 bytes."""

    gpu_gb_s: float
    """Of one GPU to the others of its node, one direction, as its vendor gives it."""
    gpu_efficiency: float
    """Share of it that large collectives reach."""
    node_gb_s: float
    """Of all network adapters of a node, one direction, line rate."""
    node_efficiency: float
    """Share of it that large collectives reach between two nodes."""
    adapters: int
    """Network adapters per node: a group with one rank per node reaches one of them."""
    congestion: float
    """Growth of the time on the network with every doubling of the number of nodes, as a share of it."""
    latency: float
    """Latency of the steps of a ring that crosses nodes, as a multiple of what NCCL's own model assumes (of a step
    inside a node, where collectives are gloo's)."""
    gpu_latency: float = 1.0
    """Latency of a collective inside a node, its start included, as a multiple of what NCCL's own model assumes."""
    gloo: Gloo | None = None
    """Where collectives are gloo's; null where they are NCCL's."""

    def __post_init__(self) -> None:
        _require_positive("links", self, "gpu_gb_s", "node_gb_s", "latency", "gpu_latency")
        _require_share("links.gpu_efficiency", self.gpu_efficiency)
        _require_share("links.node_efficiency", self.node_efficiency)
        require_at_least(f"{PREFIX}.links.adapters", self.adapters, 1)
        require_at_least(f"{PREFIX}.links.congestion", self.congestion, 0, whole=False)


@dataclass(frozen=True)
class Outside:
    """Device memory, and what of it lies outside PyTorch's allocator, in GiB (2^30 bytes)."""

    device_gib: float
    """What CUDA reports as the device's memory: less than its vendor's number."""
    context_gib: float
    """CUDA's context, the code of the libraries' kernels."""
    communicator_gib: float
    """NCCL's buffers, per process group that communicates."""

    def __post_init__(self) -> None:
        _require_positive("outside", self, "device_gib")
        for name in ("context_gib", "communicator_gib"):  # 0 on a processor
            require_at_least(f"{PREFIX}.outside.{name}", getattr(self, name), 0, whole=False)


@dataclass(frozen=True)
class Speeds:
    """Everything the simulation knows of a device's speed beyond its peaks."""

    matmul: Matmul | None
    """Null where `processor` says it."""
    attention: Attention | None
    """Null where `processor` says it."""
    memory_efficiency: float
    """Share of the memory's bandwidth that elementwise kernels reach."""
    overlap_loss: float
    """Share of its speed that computation loses while a collective runs beside it: the collective's kernels occupy
    multiprocessors and memory."""
    launch: Launch
    links: Links
    outside: Outside
    operators: dict[str, float] | None = None
    """Bandwidth an operator reaches as a multiple of what elementwise kernels reach, where it was measured: by the name
    of the operator, or name and format (``tanh bf16``). Null for the rough shares of `bench.simulate.cost.SLOW`."""
    processor: Processor | None = None
    """Of a CPU; null for a GPU."""

    def __post_init__(self) -> None:
        if self.processor is None and (self.matmul is None or self.attention is None):
            missing = "matmul" if self.matmul is None else "attention"
            raise bad_value(f"{PREFIX}.{missing}", None, "numbers, or null beside speeds.processor")
        for name, share in (self.operators or {}).items():
            if not 0 < share < math.inf:
                raise bad_value(f"{PREFIX}.operators.{name}", share, "a number above 0")
        _require_share("memory_efficiency", self.memory_efficiency)
        if not 0 <= self.overlap_loss < 1:
            raise bad_value(f"{PREFIX}.overlap_loss", self.overlap_loss, "a number from 0 up to, not including, 1")


def _require_share(field: str, value: float) -> None:
    if not 0 < value <= 1:
        raise bad_value(f"{PREFIX}.{field}", value, "a share of the peak: above 0 and at most 1")


def _require_positive(section: str, values: Any, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        if not 0 < value < math.inf:
            raise bad_value(f"{PREFIX}.{section}.{name}", value, "a number above 0")
