"""From what a simulated rank holds to what its device must have: what is reserved, what lies outside the allocator,
whether it fits, and how likely the allocator is to flush and retry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

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
"""Allocated memory on a CPU, where every byte can be measured (tests/prediction/test_predicted_memory.py)."""

STREAM_PEAKS_RATIO = RatioRange(0.98, 1.1, 1.25)
"""Reserved memory over what is active at most on each stream, all together, where nothing is played through the model
of the allocator: a stream cannot use what another has cached, and blocks are rounded and split. Fitted: of 90 runs of
T5 and GPT that were played, half were below 1.07, times `REPLAY_RATIO`; of 72 runs of one H100 and one H200
(results/measured), 95 in 100 were between 0.98 and 1.2."""

REPLAY_RATIO = RatioRange(0.92, 1.03, 1.08)
"""Reserved memory over what the model of the allocator reserves for the simulated steps. Fitted: 1.01 to 1.05 for
device memory of fms_acceleration's Mistral 7B (rows 10, 11, 13, 34 and 36 of its a100_80gb.csv), whose software is that
of whoever trains; 95 in 100 of the runs of one H100 and one H200 were between 0.92 and 1.08."""

NUM_CUBLAS_HANDLES = 2
"""The thread that runs forward and the one that runs backward have one each, and each handle has a workspace."""

MAX_CPU_LIBRARY_BYTES = 40 * MIB
"""At most, what a process takes beside tensors once its limit is set (threads' stacks, what libraries work in). The
limit of a CPU holds for that, too. Where it decided in results/measured/cpu_frontier it was 34 to 37 MiB."""


def compute_inputs_bytes(config: RunConfig, scaled_trace: ScaledTrace) -> float:
    """Of the micro-batches on a rank's device. On a CPU each rank's share is a view of the whole batch; a process that
    drives several devices has all their shares on the first."""
    base, slope = scaled_trace.inputs_bytes
    size = base + slope * scaled_trace.compute_batch_weight(config.sequences_per_device)
    if config.gradient_accumulation > 1:
        size = size / 2 * config.gradient_accumulation
    num_shares = config.strategy.find_batch_share(0, config.gpus)[1]
    return size * (num_shares if config.hardware.device == "cpu" else config.devices_per_process)


@dataclass(frozen=True)
class ReplayedMemory:
    """What the model of the allocator made of a run."""

    reserved_bytes: int
    """All there is, without workspaces, where the allocator had to give back what it cached."""
    fits: bool
    """Within the capacity: every block found a place, if need be when all that was cached had been given back."""


def predict_memory(
    config: RunConfig,
    simulated_rank: SimulatedRank,
    host_bytes: float = 0.0,
    replayed: ReplayedMemory | None = None,
) -> MemoryPrediction:
    """What the peaks of a simulated step come to on the device.

    Allocated memory on a GPU has an interval from residuals of published rows (`bench.prediction.intervals`). Where
    torch chooses other kernels than were traced, or Inductor plans compiled blocks otherwise for a GPU than for a CPU,
    it is further off.

    Parameters
    ----------
    host_bytes: float
        Kept outside of the device.
    replayed: ReplayedMemory or None
        None where the step was not played through the model of the allocator.
    """
    outside_bytes = 0.0
    if config.hardware.device == "cpu":
        allocated = active = wanted = CPU_ALLOCATED_RATIO.apply_to(simulated_rank.peak.size)
    else:
        late_bytes = max(0.0, _find_peak_active(config, simulated_rank) - simulated_rank.peak.size)
        size = simulated_rank.peak.size + compute_workspace_bytes(config)
        fewer_bytes, more_bytes = find_float8_margins(config, simulated_rank.peak.parts)
        allocated, active = (
            PredictedRange(value, value - fewer_bytes, value + more_bytes) for value in (size, size + late_bytes)
        )
        wanted = _predict_wanted(config, simulated_rank, active, replayed)
        outside_bytes = _compute_outside_bytes(config)
    beside_bytes = MAX_CPU_LIBRARY_BYTES if config.hardware.device == "cpu" else round(simulated_rank.early_bytes)
    capacity = _compute_device_capacity(config, outside_bytes)
    reserved = wanted if capacity is None else _limit_reserved(wanted, active, capacity)
    device_used = PredictedRange(
        reserved.value + outside_bytes, reserved.low + outside_bytes, reserved.high + outside_bytes
    )
    host_capacity = _compute_host_capacity(config) if host_bytes else None
    finds_place = replayed is None or replayed.fits
    fit = None if capacity is None else predict_fit(allocated, capacity, beside_bytes, finds_place=finds_place)
    if host_capacity is not None and host_bytes > host_capacity:
        fit = DOES_NOT_FIT
    return MemoryPrediction(
        allocated=allocated,
        active=active,
        reserved=reserved,
        wanted=wanted,
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
        beside=beside_bytes,
    )


def _find_peak_active(config: RunConfig, simulated_rank: SimulatedRank) -> float:
    """When a step ends the processor is ahead of the device, and more comes back late than before: so it is on an H100
    with torch 2.11 (results/measured/h100), and is not in Figure 8(b) of the FSDP paper, with torch before 2.1. Why it
    is not there is not known."""
    speeds = config.hardware.speeds
    if speeds is not None and speeds.records_nccl_stream:
        return simulated_rank.active_near_peak_bytes
    return simulated_rank.peak_active_bytes


def find_float8_margins(config: RunConfig, parts: Mapping[str, float]) -> tuple[float, float]:
    """Bytes that TransformerEngine may take less and more than what was traced, which is bf16: operands that wait for
    backward are in 8 bits, half as much at most; and it keeps weights in 8 bits as well, with a transposed copy where
    the GPU multiplies no other."""
    if not config.precision.uses_transformer_engine:
        return 0.0, 0.0
    return parts["activations"] / 2, 2 * parts["parameters"] / config.precision.parameter_itemsize


def compute_workspace_bytes(config: RunConfig) -> float:
    """What cuBLAS has of the caching allocator; nothing on a CPU."""
    if config.hardware.device == "cpu":
        return 0.0
    speeds = config.hardware.speeds
    mib = MatmulSpeed.workspace_mib if speeds is None or speeds.matmul is None else speeds.matmul.workspace_mib
    return NUM_CUBLAS_HANDLES * mib * MIB


def _add_workspace(parts: dict[str, float], workspace_bytes: float) -> dict[str, float]:
    return {**parts, "temporaries": parts["temporaries"] + workspace_bytes}


def _predict_wanted(
    config: RunConfig,
    simulated_rank: SimulatedRank,
    active: PredictedRange,
    replayed: ReplayedMemory | None,
) -> PredictedRange:
    """What the caching allocator would reserve if the device had as much as it asks for, or at least all there is where
    that is too little: never less than is active."""
    if replayed is not None:
        wanted = REPLAY_RATIO.apply_to(replayed.reserved_bytes + compute_workspace_bytes(config))
    else:
        wanted = STREAM_PEAKS_RATIO.apply_to(
            simulated_rank.stream_peaks_bytes + simulated_rank.early_bytes + compute_workspace_bytes(config)
        )
    return PredictedRange(max(wanted.value, active.value), max(wanted.low, active.low), max(wanted.high, active.high))


def _limit_reserved(wanted: PredictedRange, active: PredictedRange, capacity: int) -> PredictedRange:
    """Before the device is asked for more than it has, what is cached is given back; what is active stays."""
    return PredictedRange(
        *(
            max(active_bytes, min(wanted_bytes, capacity))
            for active_bytes, wanted_bytes in (
                (active.value, wanted.value),
                (active.low, wanted.low),
                (active.high, wanted.high),
            )
        )
    )


def predict_fit(allocated: PredictedRange, capacity: int, beside_bytes: int, *, finds_place: bool) -> str:
    """The allocator gives back what it only caches before it gives up, so what is allocated decides; and whether every
    block finds a place.

    Up to `beside_bytes` bytes of the capacity may go to something else.
    """
    if allocated.low > capacity:
        return DOES_NOT_FIT
    return FITS if finds_place and allocated.high + beside_bytes <= capacity else TOO_CLOSE


def is_replay_needed(config: RunConfig, memory: MemoryPrediction) -> bool:
    """Whether it is worth the time to play the step through the model of the allocator: where memory may be short, and
    is not short for certain; and with expandable segments."""
    if config.hardware.device == "cpu" or config.devices_per_process > 1 or memory.capacity is None:
        return False
    return memory.allocated.low <= memory.capacity and (
        config.expandable_segments or memory.wanted.high >= memory.capacity
    )


# --- Retries: memory that other streams still use is free too late, and the allocator gives back what it caches.

MAX_CERTAIN_PROBABILITY = 0.975
"""From which on something is taken for certain."""

NUM_QUANTILES = 39
"""By which a distribution is averaged over."""


@dataclass(frozen=True)
class AllocatorRetries:
    """How likely the allocator has to retry in every step, and how much of its buffers that concerns.

    Where nothing is freed across streams (FSDP2, DDP) every step allocates the same in the same order, and none are
    predicted: the allocator retries at first at most, and finds all it needs from then on. (Its model finds some in
    every step of a small model where the peak is 89 to 93 % of all memory; rows of llm-foundry ran at full speed with
    more.)
    """

    probability: float
    share: float
    """Of the bytes that are gathered into and reduced from, expected."""
    low_share: float
    high_share: float
    """19 times of 20 between these."""


NO_RETRIES = AllocatorRetries(0.0, 0.0, 0.0, 0.0)


def predict_retries(memory: MemoryPrediction, simulated_rank: SimulatedRank) -> AllocatorRetries:
    """Of every buffer that other streams use, what exceeds the free memory is asked for anew.

    What steps need without retries is less than what they would take of an empty device: what is only cached has been
    given back once. It is taken to be distributed normally on either side of its expected value.
    """
    capacity, buffer_bytes = memory.capacity, simulated_rank.largest_retried_bytes
    # When a step ends as much may come back late, or more, but by then activations have left room.
    late_bytes = simulated_rank.active_near_peak_bytes - simulated_rank.peak.size
    if capacity is None or not buffer_bytes or late_bytes < LATE_BYTES_SHARE * buffer_bytes:
        return NO_RETRIES

    needed = _predict_needed(memory, late_bytes)

    def compute_share(needed_bytes: float) -> float:
        return min(1.0, max(0.0, needed_bytes - capacity) / buffer_bytes)

    quantiles = [(number + 0.5) / NUM_QUANTILES for number in range(NUM_QUANTILES)]
    return AllocatorRetries(
        1 - _compute_probability_below(needed, capacity),
        sum(compute_share(_compute_quantile(needed, quantile)) for quantile in quantiles) / NUM_QUANTILES,
        compute_share(needed.low),
        compute_share(needed.high),
    )


def _predict_needed(memory: MemoryPrediction, late_bytes: float) -> PredictedRange:
    """What must be reserved for steps without retries: what is active at the peak, and the gaps of late frees."""
    active_bytes = memory.allocated.value + late_bytes
    return PredictedRange(
        NEEDED_RATIO.expected * active_bytes + LATE_GAP_RATIO.expected * late_bytes,
        NEEDED_RATIO.low * active_bytes + LATE_GAP_RATIO.low * late_bytes,
        NEEDED_RATIO.high * active_bytes + LATE_GAP_RATIO.high * late_bytes,
    )


NEEDED_RATIO = RatioRange(1.0, 1.02, 1.06)
"""Memory that steps need without retries over active memory: rounding, and rests of blocks. Rows of llm-foundry without
checkpointing, which are almost all activations, ran at full speed with more than 95 % of the device allocated."""

LATE_GAP_RATIO = RatioRange(0.7, 0.95, 1.3)
"""Needed beyond that, over what is active but not allocated: what comes back too late leaves as much again in gaps.
Fitted: in Figure 8(b) of the FSDP paper, where runs are short of memory, this is 0.7 to 0.95."""

LATE_BYTES_SHARE = 0.5
"""Of a buffer: with less that comes back late none waits for it."""


def _find_deviation(distribution: PredictedRange, *, is_above: bool) -> float:
    """Standard deviation on one side."""
    side_bytes = distribution.high - distribution.value if is_above else distribution.value - distribution.low
    return max(side_bytes, 1.0) / NormalDist().inv_cdf(MAX_CERTAIN_PROBABILITY)


def _compute_quantile(distribution: PredictedRange, share: float) -> float:
    deviation = _find_deviation(distribution, is_above=share > 0.5)
    return distribution.value + deviation * NormalDist().inv_cdf(share)


def _compute_probability_below(distribution: PredictedRange, value: float) -> float:
    deviation = _find_deviation(distribution, is_above=value > distribution.value)
    return NormalDist().cdf((value - distribution.value) / deviation)


# --- How much there is.


def _compute_host_capacity(config: RunConfig) -> float | None:
    """Bytes of its machine's memory that a rank may have: an equal share. None where nobody knows how much there is."""
    host = config.hardware.host
    return None if host is None else host.memory_gib * GIB / min(config.gpus, config.gpus_per_node)


def _compute_device_capacity(config: RunConfig, outside_bytes: float) -> int | None:
    """Bytes the allocator may have: the limit that is set, or the device without what lies outside the allocator."""
    hardware = config.hardware
    if hardware.memory_limit_bytes is not None:
        return hardware.memory_limit_bytes
    if hardware.speeds is not None and hardware.device != "cpu":
        return int(hardware.speeds.outside.device_gib * GIB - outside_bytes)
    return None if hardware.memory_gb is None else int(hardware.memory_gb * 1e9 - outside_bytes)


def _compute_outside_bytes(config: RunConfig) -> float:
    """Of CUDA's context and the communicators of every process group."""
    speeds = config.hardware.speeds
    if speeds is None:
        return 0.0
    num_process_groups = config.strategy.count_process_groups(config.gpus)
    return (speeds.outside.context_gib + num_process_groups * speeds.outside.communicator_gib) * GIB
