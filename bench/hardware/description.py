"""What a device can do on paper: one YAML under conf/hardware, each number with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bench.errors import bad_value, require_choice
from bench.hardware.host import Host
from bench.hardware.speeds import Speeds

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One kind of device."""

    name: str
    device: str
    """cpu or cuda."""
    gpu_names: list[str] = field(default_factory=list)
    """Names the driver gives this kind of GPU; `hardware=auto` finds the description by them."""
    peak_tflops: dict[str, float] = field(default_factory=dict)
    """Dense peak per format (fp32, tf32, bf16, fp16, fp8) in TFLOP/s; a format the device lacks is left out."""
    memory_gb: float | None = None
    """Memory of one device as its vendor gives it, in GB."""
    memory_bandwidth_gb_s: float | None = None
    """Bandwidth of that memory in 10^9 bytes per second."""
    memory_limit_gib: float | None = None
    """Memory each rank may use, enforced; null for all there is."""
    cpu_threads: int = 1
    """Threads each rank computes with on a CPU, so that a rank is the same device at every world size."""
    speeds: Speeds | None = None
    """How fast it really is, for predictions of time; null where nobody knows. A measurement does not depend on it."""
    host: Host | None = None
    """The machine around the device, for what is offloaded to it; null where nobody knows."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number comes from; no part of a run's identity."""

    def __post_init__(self) -> None:
        require_choice("hardware.device", self.device, ("cpu", "cuda"))
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < math.inf:
            raise bad_value("hardware.memory_limit_gib", self.memory_limit_gib, "a number of GiB above 0, or null")
        if self.cpu_threads < 1:
            raise bad_value("hardware.cpu_threads", self.cpu_threads, "a whole number of at least 1")
        for precision, peak in self.peak_tflops.items():
            require_choice("hardware.peak_tflops", precision, ("fp32", "tf32", "bf16", "fp16", "fp8"))
            if peak <= 0:
                raise bad_value(f"hardware.peak_tflops.{precision}", peak, "a number of TFLOP/s above 0")

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit in bytes, None for none."""
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * GIB)
