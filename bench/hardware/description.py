"""What a device can do on paper: one YAML under conf/hardware, each number with its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from bench.core.typed_config import OneOf, TextRule, Within
from bench.core.units import GIB
from bench.hardware.interconnect import Interconnect
from bench.hardware.speeds import NUMBER_FORMATS, HardwareSpeeds

PEAK_BOUNDS = Within(1e-6, 1e6, unit="TFLOP/s")

MEMORY_SLACK_SHARE = 0.02
"""Share of a GPU's memory that its vendor and NVML count, and CUDA does not give out: about 1 % of 80 GiB."""


@dataclass(frozen=True)
class Hardware:
    name: str
    device: Annotated[str, OneOf("cpu", "cuda", "rocm")]
    """A processor, a GPU of NVIDIA's or one of AMD's; PyTorch calls both kinds of GPU ``cuda``."""
    gpu_names: list[str] = field(default_factory=list)
    """Names the driver gives this kind of GPU; `hardware=auto` finds the description by them."""
    peak_tflops: dict[Annotated[str, OneOf(*NUMBER_FORMATS)], Annotated[float, PEAK_BOUNDS]] = field(
        default_factory=dict
    )
    """Dense peak per format (fp32, tf32, bf16, fp16, fp8) in TFLOP/s; a format the device lacks is left out."""
    memory_gb: Annotated[float | None, Within(1e-3, 1e6, unit="GB")] = None
    """Memory of one device as its vendor gives it, in GB."""
    memory_bandwidth_gb_s: Annotated[float | None, Within(1e-3, 1e6, unit="GB/s")] = None
    """Bandwidth of that memory in 10^9 bytes per second."""
    power_w: Annotated[float | None, Within(1e-3, 1e6, unit="W")] = None
    """Board power limit of one device in watts, for energy; no part of a run's identity."""
    memory_limit_gib: Annotated[float | None, Within(0, 1e6, exclusive_minimum=True, unit="GiB")] = None
    """Memory each rank may use, enforced; null for all there is."""
    cpu_threads: Annotated[int, Within(1, 4096)] = 1
    """Threads each rank computes with on a CPU, so that a rank is the same device at every world size."""
    speeds: HardwareSpeeds | None = None
    """How fast it really is, for predictions of time; null where nobody knows. A measurement does not depend on it."""
    host: HostHardware | None = None
    """The machine around the device, for what is offloaded to it; null where nobody knows."""
    interconnect: Interconnect | None = None
    """What `speeds.links` describes, in words; null where nobody knows. No part of a run's identity."""
    sources: dict[str, Annotated[str, TextRule("text", is_multiline=True, can_be_empty=True)]] = field(
        default_factory=dict
    )
    """Where each number comes from; no part of a run's identity."""

    @property
    def torch_device(self) -> str:
        """PyTorch's type of the device: cpu, or cuda, which AMD's GPUs are too."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit in bytes, None for none."""
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * GIB)


# --- The machine around a kind of GPU: what counts as soon as something is kept or updated outside of the device.


@dataclass(frozen=True)
class HostHardware:
    """Processors, memory and links of one machine. GB are 10^9 bytes, GiB 2^30."""

    memory_gib: Annotated[float, Within(1e-3, 1e9, unit="GiB")]
    """Of the whole machine."""
    memory_gb_s: Annotated[float, Within(1e-6, 1e6, unit="GB/s")]
    """Bandwidth of that memory on paper, all its processors together."""
    memory_efficiency: Annotated[float, Within(1e-6, 1)]
    """Share of it that an optimizer reaches whose ranks use all cores of the machine."""
    link_gb_s: Annotated[float, Within(1e-6, 1e6, unit="GB/s")]
    """Between the machine's memory and one GPU, in one direction, from page-locked memory, nobody else at it."""
    gpus_per_link: Annotated[int, Within(1, 1024)]
    """GPUs that share the way to the machine's memory: each has so much less when all use it at once."""

    def compute_link_seconds_per_byte(self, active_gpus: int) -> float:
        """Of a transfer in one direction while `active_gpus` GPUs of the machine do the same."""
        return min(active_gpus, self.gpus_per_link) / (self.link_gb_s * 1e9)

    def compute_memory_seconds_per_byte(self, active_ranks: int) -> float:
        """Of what a rank's processes read or write while `active_ranks` active_ranks of the machine do the same."""
        return active_ranks / (self.memory_gb_s * self.memory_efficiency * 1e9)
