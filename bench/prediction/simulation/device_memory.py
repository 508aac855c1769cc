"""From what a rank holds to what its device must have: rounding, fragmentation, what lies outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.core.units import GIB, MIB
from bench.hardware.speeds import MatmulSpeed
from bench.prediction.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, MemoryPrediction, PredictedRange
from bench.prediction.simulation.simulated_rank import SimulatedRank, round_parts
from bench.prediction.trace.scaled_trace import ScaledTrace


@dataclass(frozen=True)
class RatioRange:
    """Least, expected and most of something, as shares of what it is derived from."""

    low: float
    expected: float
    high: float

    def apply_to(self, value: float) -> PredictedRange:
        """The interval around what follows from `value`."""
        return PredictedRange(value * self.expected, value * self.low, value * self.high)


CPU_ALLOCATED_RATIO = RatioRange(0.97, 1.0, 1.03)
"""Allocated memory on a CPU, where every byte can be measured (tests/test_predicted_memory.py)."""

CUDA_ALLOCATED_RATIO = RatioRange(0.95, 1.0, 1.07)
"""The same on a GPU. The published peaks of Figure 8(b) are within 2.5 % (results/predicted/ACCURACY.md); nothing was
measured by us. Where torch chooses other kernels than were traced, or a compiler keeps less, it is further off."""

CROSS_STREAM_FACTOR = 1.35
"""Memory that was freed while another stream used it, over what playing the step shows of it: fitted on the difference
of active and allocated memory in Figure 8(b) of the FSDP paper, 15 to 16 GB (Figure 8(c) was not used)."""

RESERVED_RATIO = RatioRange(1.0, 1.02, 1.06)
"""Reserved over active memory: blocks are rounded up to 2 MiB and large ones split. Rows of llm-foundry without
checkpointing, which are almost all activations, ran at full speed with more than 95 % of the device allocated."""

LATE_FREE_GAP_RATIO = RatioRange(0.7, 0.95, 1.3)
"""Reserved beyond that, over what is active but not allocated: what comes back too late leaves as much again in gaps.
In Figure 8(b) this is 0.7 to 0.95."""

NUM_CUBLAS_HANDLES = 2
"""The thread that runs forward and the one that runs backward have one each, and each handle has a workspace."""

MAX_CPU_LIBRARY_BYTES = 40 * MIB
"""At most, what a process takes beside tensors once its limit is set (threads' stacks, what libraries work in). The
limit of a CPU holds for that, too. Where it decided in results/measured/cpu_frontier it was 34 to 37 MiB."""

RETRY_CAPACITY_SHARE = 0.965
"""Share of the capacity from which on the allocator is expected to flush and retry. In Figure 8(b) 78 and 79 GB
reserved were still fast, 80 were not; this lies between what those runs are predicted to reserve."""


def compute_inputs_bytes(config: RunConfig, scaled_trace: ScaledTrace) -> float:
    """Of the micro-batches on a rank's device. On a CPU each rank's share is a view of the whole batch; a process that
    drives several devices has all their shares on the first."""
    base, slope = scaled_trace.inputs_bytes
    size = base + slope * scaled_trace.compute_batch_weight(config.sequences_per_device)
    if config.gradient_accumulation > 1:
        size = size / 2 * config.gradient_accumulation
    num_shares = config.strategy.find_batch_share(0, config.gpus)[1]
    return size * (num_shares if config.hardware.device == "cpu" else config.devices_per_process)


def predict_memory(config: RunConfig, simulated_rank: SimulatedRank, host_bytes: float = 0.0) -> MemoryPrediction:
    """What the peaks of a played step come to on the device; `host_bytes` are kept outside of it."""
    outside_bytes = 0.0
    if config.hardware.device == "cpu":
        allocated = active = reserved = CPU_ALLOCATED_RATIO.apply_to(simulated_rank.peak.size)
    else:
        late_bytes = CROSS_STREAM_FACTOR * max(0.0, simulated_rank.peak_active_bytes - simulated_rank.peak.size)
        size = simulated_rank.peak.size + compute_workspace_bytes(config)
        allocated = CUDA_ALLOCATED_RATIO.apply_to(size)
        active = CUDA_ALLOCATED_RATIO.apply_to(size + late_bytes)
        reserved = _predict_reserved(active.value, late_bytes)
        outside_bytes = _compute_outside_bytes(config)
    library_bytes = MAX_CPU_LIBRARY_BYTES if config.hardware.device == "cpu" else 0
    device_used = PredictedRange(
        reserved.value + outside_bytes, reserved.low + outside_bytes, reserved.high + outside_bytes
    )
    capacity = _compute_device_capacity(config, outside_bytes)
    host_capacity = _compute_host_capacity(config) if host_bytes else None
    fit = None if capacity is None else _predict_fit(allocated, reserved, capacity, library_bytes)
    if host_capacity is not None and host_bytes > host_capacity:
        fit = DOES_NOT_FIT
    return MemoryPrediction(
        allocated=allocated,
        active=active,
        reserved=reserved,
        device_used=device_used,
        parts=round_parts(_add_workspace(simulated_rank.peak.parts, compute_workspace_bytes(config))),
        phase=simulated_rank.peak.phase,
        module=simulated_rank.peak.module,
        capacity=capacity,
        verdict=fit,
        phase_peaks=round_parts(simulated_rank.phase_peaks),
        host=round(host_bytes),
        host_capacity=None if host_capacity is None else round(host_capacity),
        initial=round(simulated_rank.initial_bytes),
        beside=library_bytes,
    )


def compute_workspace_bytes(config: RunConfig) -> float:
    """What cuBLAS has of the caching allocator; nothing on a CPU."""
    if config.hardware.device == "cpu":
        return 0.0
    speeds = config.hardware.speeds
    mib = MatmulSpeed.workspace_mib if speeds is None or speeds.matmul is None else speeds.matmul.workspace_mib
    return NUM_CUBLAS_HANDLES * mib * MIB


def _add_workspace(parts: dict[str, float], workspace_bytes: float) -> dict[str, float]:
    return {**parts, "temporaries": parts["temporaries"] + workspace_bytes}


def _predict_reserved(active: float, late_bytes: float) -> PredictedRange:
    """What the caching allocator takes for memory that is active, part of which was freed but comes back late."""
    return PredictedRange(
        RESERVED_RATIO.expected * active + LATE_FREE_GAP_RATIO.expected * late_bytes,
        RESERVED_RATIO.low * active + LATE_FREE_GAP_RATIO.low * late_bytes,
        RESERVED_RATIO.high * active + LATE_FREE_GAP_RATIO.high * late_bytes,
    )


def _predict_fit(allocated: PredictedRange, reserved: PredictedRange, capacity: int, library_bytes: int) -> str:
    """The allocator gives back what it only caches before it gives up, so what is allocated decides.

    Up to `library_bytes` bytes of the capacity may go to something else.
    """
    if allocated.low > capacity:
        return DOES_NOT_FIT
    return FITS if reserved.value <= capacity and allocated.high + library_bytes <= capacity else TOO_CLOSE


def is_degraded(memory: MemoryPrediction) -> bool:
    """Whether memory is so nearly exhausted that the allocator flushes and retries, which takes time."""
    return memory.capacity is not None and memory.reserved.value > RETRY_CAPACITY_SHARE * memory.capacity


def _compute_host_capacity(config: RunConfig) -> float | None:
    """Bytes of its machine's memory that a rank may have: an equal share. None where nobody knows how much there is."""
    host = config.hardware.host
    return None if host is None else host.memory_gib * GIB / min(config.gpus, config.gpus_per_node)


def _compute_device_capacity(config: RunConfig, outside_bytes: float) -> int | None:
    """Bytes the allocator may have: the limit that is set, or the device without what lies outside the allocator."""
    hardware = config.hardware
    if hardware.memory_limit_bytes is not None:
        return hardware.memory_limit_bytes
    if hardware.speeds is not None and hardware.device == "cuda":
        return int(hardware.speeds.outside.device_gib * GIB - outside_bytes)
    return None if hardware.memory_gb is None else int(hardware.memory_gb * 1e9 - outside_bytes)


def _compute_outside_bytes(config: RunConfig) -> float:
    """Of CUDA's context and the communicators of every process group."""
    speeds = config.hardware.speeds
    if speeds is None:
        return 0.0
    num_process_groups = (
        0 if config.gpus == 1 else 1 if config.strategy.resolved_sharding_factor in (1, config.gpus) else 3
    )
    if config.strategy.build_tensor_parallel_split() is not None:
        num_process_groups += 1
    return (speeds.outside.context_gib + num_process_groups * speeds.outside.communicator_gib) * GIB
