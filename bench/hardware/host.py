"""The machine around a kind of GPU: what counts as soon as something is kept or updated outside of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bench.typed import Within


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
