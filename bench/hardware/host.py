"""The machine around a kind of GPU: what counts as soon as something is kept or updated outside of the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.errors import bad_value, require_at_least

PREFIX = "hardware.host"


@dataclass(frozen=True)
class Host:
    """Processors, memory and links of one machine. GB are 10^9 bytes, GiB 2^30."""

    memory_gib: float
    """Of the whole machine."""
    memory_gb_s: float
    """Bandwidth of that memory on paper, all its processors together."""
    memory_efficiency: float
    """Share of it that an optimizer reaches whose ranks use all cores of the machine."""
    link_gb_s: float
    """Between the machine's memory and one GPU, in one direction, from page-locked memory, nobody else at it."""
    gpus_per_link: int
    """GPUs that share the way to the machine's memory: each has so much less when all use it at once."""

    def __post_init__(self) -> None:
        for name in ("memory_gib", "memory_gb_s", "link_gb_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise bad_value(f"{PREFIX}.{name}", getattr(self, name), "a number above 0")
        if not 0 < self.memory_efficiency <= 1:
            valid = "a share of the peak: above 0 and at most 1"
            raise bad_value(f"{PREFIX}.memory_efficiency", self.memory_efficiency, valid)
        require_at_least(f"{PREFIX}.gpus_per_link", self.gpus_per_link, 1)

    def link_seconds_per_byte(self, gpus: int) -> float:
        """Of a transfer in one direction while `gpus` GPUs of the machine do the same."""
        return min(gpus, self.gpus_per_link) / (self.link_gb_s * 1e9)

    def memory_seconds_per_byte(self, ranks: int) -> float:
        """Of what a rank's processes read or write while `ranks` ranks of the machine do the same."""
        return ranks / (self.memory_gb_s * self.memory_efficiency * 1e9)
