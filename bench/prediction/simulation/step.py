"""Simulate one optimizer step: the model's segments in order, the strategy's plan at every cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.config.run_config import RunConfig
from bench.core.units import GIB, MIB
from bench.hardware.speeds import MatmulSpeed
from bench.optimizers.base import UpdateCollective
from bench.prediction.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, MemoryPrediction, PredictedRange
from bench.prediction.simulation.parameter_layout import ParameterLayout
from bench.prediction.simulation.simulated_rank import SimulatedRank, round_parts
from bench.prediction.trace.scaled_trace import Chunk, ScaledTrace, SegmentAtBatch, expand_to_full_depth, merge_chunks
from bench.prediction.trace.trace import END_PHASE, LOSS_PLACE
from bench.strategies.step_plan import (
    ALL_GATHER_STREAM,
    GRADIENT_MEMORY,
    GRADIENTS_HANDLED_ONE_BY_ONE,
    GRADIENTS_KEPT,
    ParameterSpec,
    ShardingUnit,
    StepPlan,
    name_unit_gradients,
)


@dataclass(frozen=True)
class OptimizerUpdate:
    """The optimizer's step on one rank."""

    seconds: float
    num_kernels: int
    temporary_bytes: float
    """Bytes allocated for a while."""
    on_host: bool = False
    """By the processors of the machine around the device."""
    transfer_s: float = 0.0
    """Of the seconds, those in which parameters come from the machine's memory and go back."""
    collectives: tuple[tuple[UpdateCollective, str], ...] = ()
    """What ranks exchange within the step, each with its group."""


def simulate_step(
    simulated_rank: SimulatedRank,
    plan: StepPlan,
    layout: ParameterLayout,
    segments: Sequence[SegmentAtBatch],
    *,
    block_period: int,
    num_micro_batches: int,
    synchronize_every_micro_batch: bool,
    update: OptimizerUpdate,
) -> None:
    """One optimizer step. The machine holds what the plan's `allocate_persistent_state` put there.

    Parameters
    ----------
    segments: sequence of SegmentAtBatch
        Of one micro-batch, or of two, of which the second stands for all later ones.
    block_period: int
        Blocks after which they repeat.
    """
    segments_by_micro_batch = [
        tuple(segment for segment in segments if segment.micro_batch == number) for number in (0, 1)
    ]
    merged_chunks = MergedChunks(plan)
    for number in range(num_micro_batches):
        synchronize = synchronize_every_micro_batch or number == num_micro_batches - 1
        plan.begin_micro_batch(simulated_rank, synchronize=synchronize)
        _simulate_micro_batch(
            simulated_rank, plan, layout, segments_by_micro_batch[min(number, 1)], merged_chunks, block_period
        )
    simulated_rank.phase, simulated_rank.module = "optimizer", "optimizer"
    simulated_rank.allocate("optimizer temporaries", update.temporary_bytes, "temporaries")
    for collective, group in update.collectives:
        for _ in range(collective.count):
            simulated_rank.run_collective(
                "optimizer", collective.kind, collective.size, group, ALL_GATHER_STREAM, after="compute"
            )
        simulated_rank.wait_for_event("optimizer")
    if update.on_host:
        simulated_rank.simulate_host_optimizer_step(update.seconds)
    else:
        simulated_rank.simulate_optimizer_step(update.seconds, update.num_kernels, update.transfer_s)
    simulated_rank.free("optimizer temporaries")
    plan.after_optimizer_step(simulated_rank)
    for segment in segments:
        if (
            segment.phase == "optimizer"
            and segment.micro_batch
            == len([micro_batch_segments for micro_batch_segments in segments_by_micro_batch if micro_batch_segments])
            - 1
        ):
            for chunk in segment.chunks:
                simulated_rank.simulate_chunk(chunk, "optimizer")
    simulated_rank.synchronize()


def _simulate_micro_batch(
    simulated_rank: SimulatedRank,
    plan: StepPlan,
    layout: ParameterLayout,
    segments: tuple[SegmentAtBatch, ...],
    merged_chunks: MergedChunks,
    block_period: int,
) -> None:
    root, outside_parameters = layout.units[0], layout.parameters_by_place[None]
    current_unit: ShardingUnit | None = None
    previous_segment: SegmentAtBatch | None = None
    simulated_rank.phase, simulated_rank.module = "forward", root.name
    plan.before_forward(simulated_rank, root)
    for segment, place in expand_to_full_depth(segments, layout.block_counts, block_period):
        if segment.phase in (END_PHASE, "optimizer"):
            continue
        next_unit = layout.unit_by_place.get(place)
        if previous_segment is not None:
            if current_unit is not None and (next_unit is not current_unit or segment.phase != previous_segment.phase):
                _leave_unit(simulated_rank, plan, current_unit, previous_segment.phase)
                current_unit = None
            if segment.phase == "forward" and place == LOSS_PLACE:
                plan.after_forward(simulated_rank, root)
            if segment.phase == "backward" and previous_segment.place == LOSS_PLACE and place != LOSS_PLACE:
                plan.before_backward(simulated_rank, root)
        simulated_rank.phase, simulated_rank.module = segment.phase, layout.place_labels[place]
        if next_unit is not None and next_unit is not current_unit:
            current_unit = next_unit
            enter_unit = plan.before_forward if segment.phase == "forward" else plan.before_backward
            enter_unit(simulated_rank, current_unit)
        parameters = layout.parameters_by_place.get(place, outside_parameters)
        _simulate_segment(
            simulated_rank,
            plan,
            merged_chunks,
            segment,
            parameters,
            current_unit or root,
            layout.layer_units.get(place, {}),
        )
        previous_segment = segment
    if current_unit is not None:
        _leave_unit(simulated_rank, plan, current_unit, "backward")
    simulated_rank.module = root.name
    plan.after_backward(simulated_rank, root)
    plan.after_micro_batch_backward(simulated_rank)
    for chunk in (chunk for segment in segments if segment.phase == END_PHASE for chunk in segment.chunks):
        simulated_rank.simulate_chunk(chunk, "backward")


class MergedChunks:
    """Pieces whose gradients stay, or are added to others, as one piece: made when first asked for."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._merged_by_key: dict[tuple[int, int, str], tuple[Chunk, float]] = {}

    def get_merged(
        self, chunks: Sequence[Chunk], parameters: dict[str, ParameterSpec], gradient_handling: str
    ) -> tuple[Chunk, float]:
        """The piece, and the bytes that stay after it."""
        key = (id(chunks[0]), id(parameters), gradient_handling)
        if key not in self._merged_by_key:
            gradient_sizes = [
                float(self._plan.compute_gradient_bytes(parameters[chunk.completed_gradient]))
                if gradient_handling == GRADIENTS_KEPT and chunk.completed_gradient
                else 0.0
                for chunk in chunks[:-1]
            ]
            self._merged_by_key[key] = merge_chunks(chunks, gradient_sizes), sum(gradient_sizes)
        return self._merged_by_key[key]


def _simulate_segment(
    simulated_rank: SimulatedRank,
    plan: StepPlan,
    merged_chunks: MergedChunks,
    segment: SegmentAtBatch,
    parameters: dict[str, ParameterSpec],
    unit: ShardingUnit,
    layer_units: dict[str, ShardingUnit],
) -> None:
    """A segment of a unit, in which layers may have units of their own."""
    current_unit = unit
    for chunks in _split_at_layer_passes(segment.chunks):
        gradient_handling = plan.choose_gradient_handling(current_unit)
        if gradient_handling == GRADIENTS_HANDLED_ONE_BY_ONE:
            for chunk in chunks:
                simulated_rank.simulate_chunk(chunk, segment.phase)
                if chunk.completed_gradient is not None:
                    plan.after_gradient(simulated_rank, current_unit, parameters[chunk.completed_gradient])
        else:
            chunk, kept_bytes = merged_chunks.get_merged(chunks, parameters, gradient_handling)
            simulated_rank.simulate_chunk(chunk, segment.phase)
            if kept_bytes:
                simulated_rank.grow_allocation(name_unit_gradients(current_unit), kept_bytes, GRADIENT_MEMORY)
        layer_pass = chunks[-1].layer_pass
        if layer_pass is not None:
            layer_unit = layer_units[layer_pass.layer]
            stays_whole = segment.phase == "backward" and layer_pass.kind == "after_forward" and layer_unit.keeps_fp32
            if stays_whole or (current_unit is layer_unit and layer_pass.kind != "after_backward"):
                continue  # computed again within its own backward pass it has what it needs, and keeps it
            getattr(plan, layer_pass.kind)(simulated_rank, layer_unit)
            if layer_pass.kind == "before_backward":
                current_unit = layer_unit
            elif layer_pass.kind == "after_backward":
                current_unit = unit


def _split_at_layer_passes(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """Up to each visit, and up to the end."""
    ends = [number for number, chunk in enumerate(chunks, start=1) if chunk.layer_pass is not None]
    for start, end in pairwise([0, *ends, len(chunks)]):
        yield chunks[start:end]


def _leave_unit(simulated_rank: SimulatedRank, plan: StepPlan, unit: ShardingUnit, phase: str) -> None:
    if phase == "forward":
        plan.after_forward(simulated_rank, unit)
    else:
        plan.after_backward(simulated_rank, unit)


# --- From what a rank holds to what its device must have: rounding, fragmentation, what lies outside the allocator.


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

CUDA_ALLOCATED_RATIO = RatioRange(0.95, 1.0, 1.07)
"""The same on a GPU. The published peaks of Figure 8(b) are within 2.5 % (results/predicted/ACCURACY.md); nothing was
measured by us. Where torch chooses other kernels than were traced, or Inductor plans compiled blocks otherwise for a
GPU than for a CPU, it is further off."""

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
    """What the peaks of a simulated step come to on the device; `host_bytes` are kept outside of it."""
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
    if hardware.speeds is not None and hardware.device != "cpu":
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


# --- A step of several devices that one process drives (`torch.nn.DataParallel`), as the first and the others meet it.


def build_first_device_segments(
    device_segments: Sequence[SegmentAtBatch], batch_segments: Sequence[SegmentAtBatch], num_devices: int
) -> tuple[SegmentAtBatch, ...]:
    """What the first device does.

    Parameters
    ----------
    device_segments, batch_segments: sequence of SegmentAtBatch
        Of a device's part of the batch, and of the whole batch: the loss is taken from these.
    """
    first_device_segments = []
    extra_bytes = extra_lasting_bytes = 0.0
    for segment, batch_segment in zip(device_segments, batch_segments, strict=True):
        if segment.place == LOSS_PLACE:
            extra_bytes += _sum_over_chunks(batch_segment, "net_bytes") - _sum_over_chunks(segment, "net_bytes")
            extra_lasting_bytes += _sum_over_chunks(batch_segment, "lasting_net_bytes") - _sum_over_chunks(
                segment, "lasting_net_bytes"
            )
            first_device_segments.append(batch_segment)
        elif segment.phase == "backward" and extra_bytes:
            # The gradient of all outputs goes when the model's last layer has used its part of it.
            last_chunk = segment.chunks[-1]
            last_chunk = dataclasses.replace(
                last_chunk,
                net_bytes=last_chunk.net_bytes - extra_bytes,
                lasting_net_bytes=last_chunk.lasting_net_bytes - extra_lasting_bytes,
            )
            first_device_segments.append(dataclasses.replace(segment, chunks=(*segment.chunks[:-1], last_chunk)))
            extra_bytes = extra_lasting_bytes = 0.0
        elif segment.phase == "forward":
            chunks = (
                dataclasses.replace(chunk, num_kernels=chunk.num_kernels * num_devices) for chunk in segment.chunks
            )
            first_device_segments.append(dataclasses.replace(segment, chunks=tuple(chunks)))
        else:
            first_device_segments.append(segment)
    return tuple(first_device_segments)


def build_other_device_segments(device_segments: Sequence[SegmentAtBatch]) -> tuple[SegmentAtBatch, ...]:
    """What any other device does: no loss, of whose gradient its part arrives."""
    return tuple(
        dataclasses.replace(
            segment,
            chunks=(
                _build_memory_chunk(
                    _sum_over_chunks(segment, "net_bytes"), _sum_over_chunks(segment, "lasting_net_bytes")
                ),
            ),
        )
        if segment.place == LOSS_PLACE
        else segment
        for segment in device_segments
    )


def _build_memory_chunk(net_bytes: float, lasting_net_bytes: float) -> Chunk:
    """Memory that is taken (negative: given back), and no work."""
    peak_bytes = max(net_bytes, 0.0)
    return Chunk(
        peak_bytes=peak_bytes,
        lasting_bytes_at_peak=min(peak_bytes, max(lasting_net_bytes, 0.0)),
        net_bytes=net_bytes,
        lasting_net_bytes=lasting_net_bytes,
        seconds=0.0,
        num_kernels=0,
        completed_gradient=None,
    )


def _sum_over_chunks(segment: SegmentAtBatch, field_name: str) -> float:
    return sum(float(getattr(chunk, field_name)) for chunk in segment.chunks)
