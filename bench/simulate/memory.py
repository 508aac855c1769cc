"""From what a rank holds to what its device must have: rounding, fragmentation, what lies outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass

from bench.config import RunConfig
from bench.hardware.speeds import Matmul
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

ON_CUDA = Spread(0.95, 1.0, 1.07)
"""The same on a GPU. The published peaks of Figure 8(b) are within 2.5 % (results/predicted/ACCURACY.md); nothing was
measured by us. Where torch chooses other kernels than were traced, or a compiler keeps less, it is further off."""

ACROSS_STREAMS = 1.35
"""Memory that was freed while another stream used it, over what playing the step shows of it: fitted on the difference
of active and allocated memory in Figure 8(b) of the FSDP paper, 15 to 16 GB (Figure 8(c) was not used)."""

ROUNDED = Spread(1.0, 1.02, 1.06)
"""Reserved over active memory: blocks are rounded up to 2 MiB and large ones split. Rows of llm-foundry without
checkpointing, which are almost all activations, ran at full speed with more than 95 % of the device allocated."""

GAPS = Spread(0.7, 0.95, 1.3)
"""Reserved beyond that, over what is active but not allocated: what comes back too late leaves as much again in gaps.
In Figure 8(b) this is 0.7 to 0.95."""

CUBLAS_HANDLES = 2
"""The thread that runs forward and the one that runs backward have one each, and each handle has a workspace."""

LIBRARIES_ON_CPU_BYTES = 40 * 2**20
"""At most, what a process takes beside tensors once its limit is set (threads' stacks, what libraries work in). The
limit of a CPU holds for that, too. Where it decided in results/measured/cpu_frontier it was 34 to 37 MiB."""

NEARLY_FULL = 0.965
"""Share of the capacity from which on the allocator is expected to flush and retry. In Figure 8(b) 78 and 79 GB
reserved were still fast, 80 were not; this lies between what those runs are predicted to reserve."""


def inputs_bytes(config: RunConfig, reel: Reel) -> float:
    """Of the micro-batches on a rank's device. On a CPU each rank's share is a view of the whole batch; a process that
    drives several devices has all their shares on the first."""
    base, slope = reel.inputs
    size = base + slope * reel.weight(config.sequences_per_device)
    if config.gradient_accumulation > 1:
        size = size / 2 * config.gradient_accumulation
    shares = config.strategy.batch_share(0, config.gpus)[1]
    return size * (shares if config.hardware.device == "cpu" else config.devices_per_process)


def memory_of(config: RunConfig, machine: Machine, host_bytes: float = 0.0) -> MemoryPrediction:
    """What the peaks of a played step come to on the device; `host_bytes` are kept outside of it."""
    outside = 0.0
    if config.hardware.device == "cpu":
        allocated = active = reserved = ON_CPU.of(machine.peak.size)
    else:
        late = ACROSS_STREAMS * max(0.0, machine.active - machine.peak.size)
        size = machine.peak.size + workspace_bytes(config)
        allocated = ON_CUDA.of(size)
        active = ON_CUDA.of(size + late)
        reserved = _reserved(active.value, late)
        outside = _outside(config)
    beside = LIBRARIES_ON_CPU_BYTES if config.hardware.device == "cpu" else 0
    used = Range(reserved.value + outside, reserved.low + outside, reserved.high + outside)
    capacity = _capacity(config, outside)
    host_capacity = _host_capacity(config) if host_bytes else None
    verdict = None if capacity is None else _verdict(allocated, reserved, capacity, beside)
    if host_capacity is not None and host_bytes > host_capacity:
        verdict = DOES_NOT_FIT
    return MemoryPrediction(
        allocated=allocated,
        active=active,
        reserved=reserved,
        device_used=used,
        parts=rounded(_with_workspace(machine.peak.parts, workspace_bytes(config))),
        phase=machine.peak.phase,
        module=machine.peak.module,
        capacity=capacity,
        verdict=verdict,
        phase_peaks=rounded(machine.phase_peaks),
        host=round(host_bytes),
        host_capacity=None if host_capacity is None else round(host_capacity),
        initial=round(machine.initial),
        beside=beside,
    )


def workspace_bytes(config: RunConfig) -> float:
    """What cuBLAS has of the caching allocator; nothing on a CPU."""
    if config.hardware.device == "cpu":
        return 0.0
    speeds = config.hardware.speeds
    mib = Matmul.workspace_mib if speeds is None or speeds.matmul is None else speeds.matmul.workspace_mib
    return CUBLAS_HANDLES * mib * 2**20


def _with_workspace(parts: dict[str, float], workspace: float) -> dict[str, float]:
    return {**parts, "temporaries": parts["temporaries"] + workspace}


def _reserved(active: float, late: float) -> Range:
    """What the caching allocator takes for memory that is active, part of which was freed but comes back late."""
    return Range(
        ROUNDED.expected * active + GAPS.expected * late,
        ROUNDED.low * active + GAPS.low * late,
        ROUNDED.high * active + GAPS.high * late,
    )


def _verdict(allocated: Range, reserved: Range, capacity: int, beside: int) -> str:
    """The allocator gives back what it only caches before it gives up, so what is allocated decides.

    Up to `beside` bytes of the capacity may go to something else.
    """
    if allocated.low > capacity:
        return DOES_NOT_FIT
    return FITS if reserved.value <= capacity and allocated.high + beside <= capacity else TOO_CLOSE


def is_degraded(memory: MemoryPrediction) -> bool:
    """Whether memory is so nearly exhausted that the allocator flushes and retries, which takes time."""
    return memory.capacity is not None and memory.reserved.value > NEARLY_FULL * memory.capacity


def _host_capacity(config: RunConfig) -> float | None:
    """Bytes of its machine's memory that a rank may have: an equal share. None where nobody knows how much there is."""
    host = config.hardware.host
    return None if host is None else host.memory_gib * GIB / min(config.gpus, config.gpus_per_node)


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
    if config.strategy.split() is not None:
        groups += 1
    return (speeds.outside.context_gib + groups * speeds.outside.communicator_gib) * GIB
