"""From what a rank holds to what its device must have: rounding, fragmentation, what lies outside the allocator."""

from __future__ import annotations

from bench.config import RunConfig
from bench.simulate.machine import Machine, rounded
from bench.simulate.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, MemoryPrediction, Range
from bench.simulate.reel import Reel

GIB = 2**30

ALLOCATED_SHARE = 0.01
"""Interval of allocated memory, as a share of it: on a CPU, where every byte can be measured, errors stay below."""

RESERVED_SHARE = (0.0, 0.06, 0.20)
"""Reserved beyond active memory, as a share of it: least, expected, most. Caching allocators round blocks up and split
large ones."""


def inputs_bytes(config: RunConfig, reel: Reel) -> float:
    """Of the micro-batches on a rank's device. On a CPU each rank's share is a view of the whole batch."""
    base, slope = reel.inputs
    size = base + slope * reel.weight(config.batch_size_per_gpu)
    if config.gradient_accumulation > 1:
        size = size / 2 * config.gradient_accumulation
    return size * (config.gpus if config.hardware.device == "cpu" else 1)


def memory_of(config: RunConfig, machine: Machine) -> MemoryPrediction:
    """What the peaks of a played step come to on the device."""
    allocated = _around(machine.peak.size, ALLOCATED_SHARE)
    on_cpu = config.hardware.device == "cpu"
    active = allocated if on_cpu else _around(max(machine.active, machine.peak.size), 2 * ALLOCATED_SHARE)
    reserved = active if on_cpu else Range(*(active.value * (1 + RESERVED_SHARE[n]) for n in (1, 0, 2)))
    outside = 0.0 if on_cpu else _outside(config)
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


def _around(value: float, share: float) -> Range:
    return Range(value, value * (1 - share), value * (1 + share))


def _verdict(allocated: Range, reserved: Range, capacity: int) -> str:
    """The allocator gives back what it only caches before it gives up, so what is allocated decides."""
    if allocated.low > capacity:
        return DOES_NOT_FIT
    return FITS if reserved.value <= capacity else TOO_CLOSE


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
    return (speeds.outside.context_gib + groups * speeds.outside.communicator_gib) * GIB
