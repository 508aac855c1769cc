"""Simulate one optimizer step: the model's segments in order, the strategy's plan at every cut."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.optimizers.base import UpdateCollective
from bench.prediction.simulation.block_repetition import BlockRepetition, RepeatedBlocks, find_repeated_blocks
from bench.prediction.simulation.parameter_layout import ParameterLayout
from bench.prediction.simulation.rank_memory import ACTIVATION_MEMORY
from bench.prediction.simulation.repetition import Repetition
from bench.prediction.simulation.simulated_rank import SimulatedRank
from bench.prediction.trace.chunks import Chunk, SegmentAtBatch, expand_to_full_depth, merge_chunks
from bench.prediction.trace.trace import END_PHASE, LOSS_PLACE, BlockPlace
from bench.strategies.plan_inputs import ParameterSpec, ShardingUnit
from bench.strategies.step_plan import (
    ALL_GATHER_STREAM,
    GRADIENT_MEMORY,
    GRADIENTS_HANDLED_ONE_BY_ONE,
    GRADIENTS_KEPT,
    StepPlan,
    name_unit_gradients,
)

FROZEN_INPUTS_NAME = "inputs of frozen units"


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
    micro_batches = [
        _arrange_micro_batch(micro_batch_segments, layout, block_period)
        for micro_batch_segments in segments_by_micro_batch
    ]
    merged_chunks = MergedChunks(plan)
    repetition = Repetition(simulated_rank)
    number = 0
    while number < num_micro_batches:
        synchronize = synchronize_every_micro_batch or number == num_micro_batches - 1
        plan.begin_micro_batch(simulated_rank, number=number, synchronize=synchronize)
        _simulate_micro_batch(simulated_rank, plan, layout, micro_batches[min(number, 1)], merged_chunks)
        number += 1
        if number > 1:  # the first differs from those behind it, and so may the last
            number += repetition.leave_out(num_micro_batches - 1 - number)
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


@dataclass(frozen=True)
class _MicroBatch:
    """What a micro-batch computes, at the model's true depth."""

    passes: Sequence[tuple[SegmentAtBatch, BlockPlace]]
    """Over blocks, and over what lies outside of them, forward and backward, with their places."""
    repeated_blocks: Mapping[int, RepeatedBlocks]
    """As `find_repeated_blocks` says of the passes."""
    end_chunks: Sequence[Chunk]
    """What follows them."""


@functools.lru_cache(maxsize=64)
def _arrange_micro_batch(
    segments: tuple[SegmentAtBatch, ...], layout: ParameterLayout, block_period: int
) -> _MicroBatch:
    passes = [
        (segment, place)
        for segment, place in expand_to_full_depth(segments, layout.block_counts, block_period)
        if segment.phase not in (END_PHASE, "optimizer")
    ]
    end_chunks = [chunk for segment in segments if segment.phase == END_PHASE for chunk in segment.chunks]
    return _MicroBatch(passes, find_repeated_blocks(passes, layout), end_chunks)


def _simulate_micro_batch(
    simulated_rank: SimulatedRank,
    plan: StepPlan,
    layout: ParameterLayout,
    micro_batch: _MicroBatch,
    merged_chunks: MergedChunks,
) -> None:
    root, outside_parameters = layout.units[0], layout.parameters_by_place[None]
    current_unit: ShardingUnit | None = None
    previous_segment: SegmentAtBatch | None = None
    input_bytes: dict[int, float] = defaultdict(float)
    simulated_rank.phase, simulated_rank.module = "forward", root.name
    plan.before_forward(simulated_rank, root)
    passes = micro_batch.passes
    repetition: BlockRepetition | None = None
    index = 0
    while index < len(passes):
        blocks = micro_batch.repeated_blocks.get(index)
        if blocks is not None:
            repetition = BlockRepetition(simulated_rank, plan) if blocks.is_first else repetition
            assert repetition is not None
            num_left_out = repetition.leave_out(blocks.num_left)
            if num_left_out:
                index += num_left_out * blocks.period
                last_place = passes[index - 1][1]
                current_unit, simulated_rank.module = layout.unit_by_place[last_place], layout.place_labels[last_place]
        segment, place = passes[index]
        index += 1
        next_unit = layout.unit_by_place.get(place)
        if previous_segment is not None:
            if current_unit is not None and (next_unit is not current_unit or segment.phase != previous_segment.phase):
                _leave_unit(simulated_rank, plan, current_unit, previous_segment.phase)
                if previous_segment.phase == "backward":
                    _keep_frozen_input(simulated_rank, current_unit, input_bytes[current_unit.index])
                current_unit = None
            if segment.phase == "forward" and place == LOSS_PLACE:
                plan.after_forward(simulated_rank, root)
            if segment.phase == "backward" and previous_segment.place == LOSS_PLACE and place != LOSS_PLACE:
                plan.before_backward(simulated_rank, root)
        simulated_rank.phase, simulated_rank.module = segment.phase, layout.place_labels[place]
        simulated_rank.place = place
        if next_unit is not None and next_unit is not current_unit:
            current_unit = next_unit
            enter_unit = plan.before_forward if segment.phase == "forward" else plan.before_backward
            enter_unit(simulated_rank, current_unit)
        if segment.phase == "forward" and current_unit is not None:
            input_bytes[current_unit.index] += segment.lasting_bytes
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
    simulated_rank.free(FROZEN_INPUTS_NAME)
    for chunk in micro_batch.end_chunks:
        simulated_rank.simulate_chunk(chunk, "backward")


def _keep_frozen_input(simulated_rank: SimulatedRank, unit: ShardingUnit, input_bytes: float) -> None:
    """What a checkpointed unit kept of its forward pass, and the gradient of it, stay where the rank is said to keep
    them."""
    if simulated_rank.keeps_frozen_inputs and not unit.is_root and not unit.trained_parameters:
        simulated_rank.grow_allocation(FROZEN_INPUTS_NAME, 2 * input_bytes, ACTIVATION_MEMORY)


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
    for chunks in segment.layer_passes:
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


def _leave_unit(simulated_rank: SimulatedRank, plan: StepPlan, unit: ShardingUnit, phase: str) -> None:
    if phase == "forward":
        plan.after_forward(simulated_rank, unit)
    else:
        plan.after_backward(simulated_rank, unit)


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
            extra_bytes += batch_segment.net_bytes - segment.net_bytes
            extra_lasting_bytes += batch_segment.lasting_bytes - segment.lasting_bytes
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
            chunks=(_build_memory_chunk(segment.net_bytes, segment.lasting_bytes),),
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
