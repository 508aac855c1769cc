"""The stages of a run as they are simulated: parameters, segments, and what each exchanges with its neighbours."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from bench.config.run_config import RunConfig
from bench.models import Family
from bench.models.checkpointing import BlockPositions
from bench.prediction.cost import rank_speed
from bench.prediction.cost.rank_groups import LayerGroups, list_layer_groups
from bench.prediction.simulation.parameter_layout import (
    build_order_key,
    build_parameter_layout,
    compute_order_keys,
)
from bench.prediction.trace.chunks import (
    Chunk,
    SegmentAtBatch,
    build_chunks,
    count_segment_repetitions,
    expand_to_full_depth,
    merge_chunks,
)
from bench.prediction.trace.kernels import MATMUL, FloatArray
from bench.prediction.trace.scaled_trace import ScaledSegment, list_traced_batch_sizes, scale_kernels
from bench.prediction.trace.trace import BlockPlace, GradientEvent, LocatedParameter, TraceKey
from bench.prediction.trace.trace_cache import HashableHardware, load_scaled_trace
from bench.prediction.trace.traced_blocks import StageTraceKey, list_stage_blocks, shorten_stage_blocks
from bench.strategies.pipeline.schedule import FORWARD, Timetable
from bench.strategies.pipeline.step_plans import StagePlan, StageUnits, find_tied_parameters
from bench.strategies.plan_inputs import ParameterSpec, ShardingUnit

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SimulatedPipelineStage:
    """One stage as it is simulated: its parameters, its segments and what it exchanges with its neighbours."""

    units: StageUnits
    segments: tuple[tuple[SegmentAtBatch, tuple[ShardingUnit, ...], dict[str, ParameterSpec]], ...]
    """In order, with the units and the parameters that each belongs to: a block's, and what is within it."""
    received_bytes: float
    """Of one micro-batch, from the stage before it; as many gradients go back."""
    sent_bytes: float
    """To the stage behind it."""
    produced_bytes: float
    """Of what it sends, that which it made: decoders of T5 hand on the encoder's output as they got it."""
    logits_bytes: float
    """Of the last stage."""
    sequence_bytes: float
    """Tokens of one sequence."""
    weight_s: float = 0.0
    """Seconds of the products that gradients of weights take, of a micro-batch."""
    _backward_chunks: dict[bool, tuple[Chunk, float]] = field(default_factory=dict)
    _named_chunks: dict[str, Chunk] = field(default_factory=dict)

    def replace_segments(self, segments: Sequence[SegmentAtBatch]) -> SimulatedPipelineStage:
        """The stage with other segments, in the same order."""
        replaced = tuple(
            (segment, units, parameters)
            for segment, (_, units, parameters) in zip(segments, self.segments, strict=True)
        )
        return dataclasses.replace(self, segments=replaced, _backward_chunks={}, _named_chunks={})

    @functools.cached_property
    def forward_chunk(self) -> Chunk:
        """All of it at once."""
        segments = [segment for segment, _, _ in self.segments if segment.phase == FORWARD]
        return merge_chunks(
            [chunk for segment in segments for chunk in segment.chunks], self._list_zero_gradients(segments)
        )

    def get_backward_chunk(self, plan: StagePlan, *, is_first: bool) -> tuple[Chunk, float]:
        """All of it at once, and the bytes of gradients that stay; in later micro-batches none are new.

        A stage belongs to one rank, so to one plan.
        """
        if is_first not in self._backward_chunks:
            self._backward_chunks[is_first] = self._merge_backward_chunks(plan, is_first)
        return self._backward_chunks[is_first]

    def get_input_backward_chunk(self, plan: StagePlan) -> Chunk:
        """The first part of a backward that is split.

        Its peak is taken to be that of the whole backward, and all that the forward pass has left to stay until the
        gradients of weights are computed: what of it is not needed for them goes, and gradients of what layers put out,
        which are as large, take its place.
        """

        def build() -> Chunk:
            whole_chunk = self.get_backward_chunk(plan, is_first=False)[0]
            return dataclasses.replace(whole_chunk, net_bytes=0.0, lasting_net_bytes=0.0)

        return self.remember_chunk("inputs", build)

    def get_weight_backward_chunk(self, plan: StagePlan) -> Chunk:
        """The second part: what the first has left of the whole backward."""

        def build() -> Chunk:
            input_chunk = self.get_input_backward_chunk(plan)
            whole_chunk = self.get_backward_chunk(plan, is_first=False)[0]
            net_bytes = whole_chunk.net_bytes - input_chunk.net_bytes
            peak_bytes = max(net_bytes, 0.0)
            return dataclasses.replace(
                input_chunk,
                peak_bytes=peak_bytes,
                lasting_bytes_at_peak=peak_bytes,
                net_bytes=net_bytes,
                lasting_net_bytes=whole_chunk.lasting_net_bytes - input_chunk.lasting_net_bytes,
            )

        return self.remember_chunk("weights", build)

    def list_backward_units(self) -> list[tuple[tuple[ShardingUnit, ...], list[ParameterSpec]]]:
        """In the order in which they are left, with the parameters whose gradients are complete by then."""
        return [
            (units, [parameters[name] for name in _list_gradients(segment)])
            for segment, units, parameters in self.segments
            if segment.phase != FORWARD and _list_gradients(segment)
        ]

    def remember_chunk(self, name: str, build: Callable[[], Chunk]) -> Chunk:
        """A piece that is made of several, when first asked for: a stage belongs to one rank, so to one plan."""
        if name not in self._named_chunks:
            self._named_chunks[name] = build()
        return self._named_chunks[name]

    def _merge_backward_chunks(self, plan: StagePlan, is_first: bool) -> tuple[Chunk, float]:
        chunks, gradient_sizes = [], []
        for segment, _, parameters in self.segments:
            if segment.phase == FORWARD:
                continue
            for chunk in segment.chunks:
                chunks.append(chunk)
                gradient_sizes.append(
                    plan.compute_kept_gradient_bytes(parameters[chunk.completed_gradient])
                    if is_first and chunk.completed_gradient is not None
                    else 0.0
                )
        return merge_chunks(chunks, gradient_sizes[:-1]), sum(gradient_sizes)

    @staticmethod
    def _list_zero_gradients(segments: Sequence[SegmentAtBatch]) -> list[float]:
        return [0.0] * (sum(len(segment.chunks) for segment in segments) - 1)


def _list_gradients(segment: SegmentAtBatch) -> list[str]:
    return [chunk.completed_gradient for chunk in segment.chunks if chunk.completed_gradient is not None]


def list_stage_traces(config: RunConfig, key: TraceKey) -> list[tuple[TraceKey | StageTraceKey, int]]:
    """Traces of stages, and the sizes of micro-batches at which they are needed."""
    timetable = config.strategy.timetable
    assert timetable is not None
    stage_keys = {stage_key: None for stage_key, _ in _cut_into_stages(config, key, timetable)}
    return [
        (stage_key, size)
        for stage_key in stage_keys
        for size in set(
            list_traced_batch_sizes(count_sequences(config, timetable), is_compiled=config.has_compiled_parts)
        )
    ]


def count_sequences(config: RunConfig, timetable: Timetable) -> int:
    """Of a micro-batch."""
    return config.sequences_per_rank // timetable.micro_batches


def _count_handover_parts(config: RunConfig) -> int:
    split = config.strategy.build_tensor_parallel_split()
    return 1 if split is None else split.handover_parts


def _cut_into_stages(
    config: RunConfig, key: TraceKey, timetable: Timetable
) -> list[tuple[StageTraceKey, tuple[int, ...]]]:
    """Of each stage its trace, and its blocks per list."""
    block_counts = build_parameter_layout(config.model, 1, False).block_counts
    stages = [
        list_stage_blocks(block_counts, blocks) for blocks in timetable.split_blocks(config.model.num_blocks or 0)
    ]
    return [
        (
            StageTraceKey(key, shorten_stage_blocks(stage_blocks, key, block_counts)),
            tuple(blocks.num_blocks for blocks in stage_blocks),
        )
        for stage_blocks in stages
    ]


def build_pipeline_stages(config: RunConfig, key: TraceKey, timetable: Timetable) -> list[SimulatedPipelineStage]:
    """Every stage of a run."""
    from bench.prediction.trace.stage_trace import find_handover_dtype

    num_sequences = count_sequences(config, timetable)
    block_ranges = timetable.split_blocks(config.model.num_blocks or 0)
    itemsize = find_handover_dtype(key).itemsize

    def compute_handed_bytes(block: int) -> float:
        shapes = config.model.find_stage_input_shapes(block, config.sequence_length // _count_handover_parts(config))
        return num_sequences * itemsize * sum(length * width for length, width in shapes)

    layer_groups = list_layer_groups(config)
    stages = []
    for index, (stage_key, block_counts) in enumerate(_cut_into_stages(config, key, timetable)):
        segments, weight_seconds = _build_stage_segments(
            stage_key, num_sequences, rank_speed.build_hashable_hardware(config), block_counts, layer_groups
        )
        scaled_trace = load_scaled_trace(
            stage_key, list_traced_batch_sizes(num_sequences, is_compiled=config.has_compiled_parts)
        )
        units, ordered_segments = arrange_stage(index, stage_key, block_counts, scaled_trace.parameters, segments)
        is_last = index == timetable.num_stages - 1
        stages.append(
            SimulatedPipelineStage(
                units,
                ordered_segments,
                received_bytes=0.0 if index == 0 else compute_handed_bytes(block_ranges[index].start),
                sent_bytes=0.0 if is_last else compute_handed_bytes(block_ranges[index].stop),
                produced_bytes=0.0
                if is_last
                else scaled_trace.outputs_bytes[0]
                + scaled_trace.compute_batch_weight(num_sequences) * scaled_trace.outputs_bytes[1],
                logits_bytes=_compute_logits_bytes(config, key, num_sequences) if is_last else 0.0,
                sequence_bytes=scaled_trace.inputs_bytes[1]
                or scaled_trace.inputs_bytes[0] / scaled_trace.traced_batch_sizes[0],
                weight_s=sum(weight_seconds[id(segment)] for segment, _, _ in ordered_segments),
            )
        )
    return stages


@functools.lru_cache(maxsize=1)
def _build_whole_model(family: Family) -> nn.Module:
    return family.build_model()


@functools.lru_cache(maxsize=256)
def find_shared_parameters(family: Family, stage_blocks: tuple[range, ...]) -> dict[str, tuple[int, list[int]]]:
    """Parameters that several stages have, by their names in the whole model: elements, and those stages."""
    import torch

    from bench.models.materialize import Materializer

    model = _build_whole_model(family)
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    materializer = Materializer(model, family, torch.device("meta"), seed=0)
    parameter_names = [materializer.list_parameter_names(family.build_stage(model, blocks)) for blocks in stage_blocks]
    return {name: (numels[name], stages) for name, stages in find_tied_parameters(parameter_names).items()}


def list_run_shared_parameters(config: RunConfig, timetable: Timetable) -> dict[str, tuple[int, list[int]]]:
    """Those of a run that are trained, as `find_shared_parameters` has them: beside adapters, which are in blocks, all
    are frozen."""
    if config.finetune.name != "full":
        return {}
    return find_shared_parameters(config.model, tuple(timetable.split_blocks(config.model.num_blocks or 0)))


def _compute_logits_bytes(config: RunConfig, key: TraceKey, num_sequences: int) -> float:
    """From the FLOPs of the head: two per element of the logits and of the hidden states."""
    shapes = config.model.find_stage_input_shapes(config.model.num_blocks or 0, config.sequence_length)
    length, width = shapes[0]
    vocabulary = config.model.count_flops_per_sequence(config.sequence_length).outside_blocks / (2 * length * width)
    itemsize = config.precision.compute_itemsize
    split = config.strategy.build_tensor_parallel_split()
    num_parts = 1 if split is None else split.context_degree * split.degree
    return num_sequences * length * vocabulary * itemsize / num_parts


@functools.lru_cache(maxsize=256)
def _build_stage_segments(
    key: StageTraceKey,
    num_sequences: int,
    hashable_hardware: HashableHardware,
    block_counts: tuple[int, ...],
    layer_groups: LayerGroups,
) -> tuple[tuple[SegmentAtBatch, ...], dict[int, float]]:
    """The segments, and the seconds of products for gradients of weights in each, by its identity."""
    scaled_trace = load_scaled_trace(
        key, list_traced_batch_sizes(num_sequences, is_compiled=key.trace_key.has_compiled_parts)
    )
    batch_weight = scaled_trace.compute_batch_weight(num_sequences)
    segment_kernels = [scale_kernels(scaled_segment, batch_weight) for scaled_segment in scaled_trace.segments]
    positions = _find_stage_block_positions(key, block_counts)
    segment_seconds = rank_speed.compute_seconds_per_segment(
        hashable_hardware.hardware,
        key.trace_key.precision,
        segment_kernels,
        key.trace_key.family.count_expert_tokens(key.trace_key.sequence_length),
        count_segment_repetitions(scaled_trace.segments, positions),
    )
    time_collective = rank_speed.build_layer_collective_timer(
        hashable_hardware.hardware, key.trace_key.precision, layer_groups
    )
    segments = tuple(
        SegmentAtBatch(
            scaled_segment.phase,
            scaled_segment.micro_batch,
            scaled_segment.place,
            build_chunks(scaled_segment, batch_weight, kernel_seconds, positions, time_collective),
        )
        for scaled_segment, kernel_seconds in zip(scaled_trace.segments, segment_seconds, strict=True)
    )
    weight_seconds = {
        id(segment): _sum_weight_seconds(scaled_segment, kernel_seconds)
        for segment, scaled_segment, kernel_seconds in zip(
            segments, scaled_trace.segments, segment_seconds, strict=True
        )
    }
    return segments, weight_seconds


def _sum_weight_seconds(segment: ScaledSegment, kernel_seconds: FloatArray | None) -> float:
    """Of the last matrix product before each gradient is complete: that is its own, or one of the same size."""
    if kernel_seconds is None:
        return 0.0
    is_product = segment.kernels[0].kinds == MATMUL
    seconds, start = 0.0, 0
    for end, event in zip(segment.kernel_ends, segment.events, strict=False):
        products = np.flatnonzero(is_product[start:end])
        if len(products) and isinstance(event, GradientEvent):
            seconds += float(kernel_seconds[start + products[-1]])
        start = end
    return seconds


def arrange_stage(
    index: int,
    key: StageTraceKey,
    block_counts: tuple[int, ...],
    traced: Sequence[LocatedParameter],
    segments: tuple[SegmentAtBatch, ...],
) -> tuple[StageUnits, tuple[tuple[SegmentAtBatch, tuple[ShardingUnit, ...], dict[str, ParameterSpec]], ...]]:
    """A stage at its true depth. Experts that other ranks have other ones of are a unit within their block's."""
    traced_parameters: dict[BlockPlace, dict[str, ParameterSpec]] = {None: {}}
    for place, spec in traced:
        traced_parameters.setdefault(place, {})[spec.name] = spec
    order_keys = compute_order_keys([(place, spec.name) for place, spec in traced])
    next_index = 0
    root = ShardingUnit(-1, f"stage {index}", tuple(traced_parameters[None].values()))
    root_units = (root,)
    units: dict[BlockPlace, tuple[ShardingUnit, ...]] = {}
    parameters: dict[BlockPlace, dict[str, ParameterSpec]] = {}
    keyed_parameters = [(order_keys[None, name], parameter) for name, parameter in traced_parameters[None].items()]
    for list_index, positions in enumerate(_find_stage_block_positions(key, block_counts)):
        for position in range(positions.num_blocks):
            place = (list_index, position)
            traced_place = (list_index, positions.find_traced(position))
            parameters[place] = traced_parameters[traced_place]
            keyed_parameters += [
                (build_order_key(order_keys, place, traced_place, parameter), parameter)
                for parameter in traced_parameters[traced_place].values()
            ]
            units[place] = _build_block_units(index, next_index, tuple(parameters[place].values()))
            next_index += len(units[place])
    ordered_segments = tuple(
        (segment, units.get(place, root_units), parameters.get(place, traced_parameters[None]))
        for segment, place in expand_to_full_depth(segments, block_counts, key.trace_key.block_period)
    )
    stage_parameters = tuple(parameter for _, parameter in sorted(keyed_parameters, key=itemgetter(0)))
    all_units = (root, *(unit for block_units in units.values() for unit in block_units))
    return StageUnits(index, all_units, stage_parameters), ordered_segments


def _build_block_units(
    stage_index: int, unit_index: int, parameters: tuple[ParameterSpec, ...]
) -> tuple[ShardingUnit, ...]:
    parts = [
        tuple(parameter for parameter in parameters if parameter.is_expert == is_expert) for is_expert in (False, True)
    ]
    return tuple(
        ShardingUnit(unit_index + number, f"stage {stage_index}", part, is_within_next_unit=number > 0)
        for number, part in enumerate(part for part in parts if part)
    )


def _find_stage_block_positions(key: StageTraceKey, block_counts: tuple[int, ...]) -> list[BlockPositions]:
    period = key.trace_key.block_period
    return [
        BlockPositions(num_blocks, traced_blocks.num_blocks, period)
        for num_blocks, traced_blocks in zip(block_counts, key.stage_blocks, strict=True)
    ]
