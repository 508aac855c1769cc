"""From what a rank holds to what its device must have: rounding, fragmentation, what lies outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass

from bench.config import RunConfig
from bench.simulate.machine import Machine, rounded
from bench.simulate.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, MemoryPrediction, Range
from bench.simulate.reel import Reel

GIB = 2**30


@dataclass(frozen=True)
class Spread:
    """Least, expected and most of something, as shares of what it is derived from."""

    low: float
    expected: float
    high: float

    def of(self, value: float) -> Range:
        """The interval around what follows from `value`."""
        return Range(value * self.expected, value * self.low, value * self.high)


ON_CPU = Spread(0.97, 1.0, 1.03)
"""Allocated memory on a CPU, where every byte can be measured (tests/test_predicted_memory.py)."""

ON_CUDA = Spread(0.95, 1.0, 1.20)
"""The same on a GPU. The published peaks of Figure 8(b) are up to a fifth above (results/predicted/ACCURACY.md); where
torch chooses other kernels than were traced, or the compiler keeps less, memory is lower."""

RESERVED = Spread(1.0, 1.08, 1.25)
"""Reserved over active memory where all memory is freed on the stream that uses it: the caching allocator rounds blocks
up to 2 MiB and splits large ones. Assumed: nobody publishes it."""

RESERVED_ACROSS_STREAMS = Spread(1.12, 1.25, 1.35)
"""The same where memory is freed while other streams use it, which leaves more gaps: reserved over active in Figure
8(b) of the FSDP paper is 1.22 to 1.29; in Figure 8(c), not used here, 1.12 to 1.44."""

WORKSPACE_BYTES = 8_519_680
"""cuBLAS takes this from the caching allocator (``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8``, PyTorch's default; 32 MiB on
Hopper, which is as little)."""

NEARLY_FULL = 0.95
"""Share of the capacity from which on the allocator is expected to flush and retry."""


def inputs_bytes(config: RunConfig, reel: Reel) -> float:
    """Of the micro-batches on a rank's device. On a CPU each rank's share is a view of the whole batch."""
    base, slope = reel.inputs
    size = base + slope * reel.weight(config.batch_size_per_gpu)
    if config.gradient_accumulation > 1:
        size = size / 2 * config.gradient_accumulation
    return size * (config.gpus if config.hardware.device == "cpu" else 1)


def memory_of(config: RunConfig, machine: Machine, *, across_streams: bool) -> MemoryPrediction:
    """What the peaks of a played step come to on the device.

    Parameters
    ----------
    across_streams: bool
        Memory is freed while other streams use it.
    """
    outside = 0.0
    if config.hardware.device == "cpu":
        allocated = active = reserved = ON_CPU.of(machine.peak.size)
    else:
        allocated = ON_CUDA.of(machine.peak.size + WORKSPACE_BYTES)
        active = ON_CUDA.of(max(machine.active, machine.peak.size) + WORKSPACE_BYTES)
        reserved = (RESERVED_ACROSS_STREAMS if across_streams else RESERVED).of(active.value)
        outside = _outside(config)
    used = Range(reserved.value + outside, reserved.low + outside, reserved.high + outside)
    capacity = _capacity(config, outside)
    return MemoryPrediction(
        allocated=allocated,
        active=active,
        reserved=reserved,
        device_used=used,
        parts=rounded(machine.peak.parts),
        phase=machine.peak.phase,
        module=machine.peak.module,
        capacity=capacity,
        verdict=None if capacity is None else _verdict(allocated, reserved, capacity),
        phase_peaks=rounded(machine.phase_peaks),
    )


def _verdict(allocated: Range, reserved: Range, capacity: int) -> str:
    """The allocator gives back what it only caches before it gives up, so what is allocated decides."""
    if allocated.low > capacity:
        return DOES_NOT_FIT
    return FITS if reserved.value <= capacity and allocated.high <= capacity else TOO_CLOSE


def is_degraded(memory: MemoryPrediction) -> bool:
    """Whether memory is so nearly exhausted that the allocator flushes and retries, which takes time."""
    return memory.capacity is not None and memory.reserved.value > NEARLY_FULL * memory.capacity


def _capacity(config: RunConfig, outside: float) -> int | None:
    """Bytes the allocator may have: the limit that is set, or the device without what lies outside the allocator."""
    hardware = config.hardware
    if hardware.memory_limit_bytes is not None:
        return hardware.memory_limit_bytes
    if hardware.speeds is not None and hardware.device == "cuda":
        return int(hardware.speeds.outside.device_gib * GIB - outside)
    return None if hardware.memory_gb is None else int(hardware.memory_gb * 1e9 - outside)


def _outside(config: RunConfig) -> float:
    """Of CUDA's context and the communicators of every process group."""
    speeds = config.hardware.speeds
    if speeds is None:
        return 0.0
    groups = 0 if config.gpus == 1 else 1 if config.strategy.factor in (1, config.gpus) else 3
    network = speeds.outside.network_gib if config.nodes > 1 else 0.0
    return (speeds.outside.context_gib + groups * speeds.outside.communicator_gib + network) * GIB
