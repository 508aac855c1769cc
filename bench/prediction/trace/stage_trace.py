"""The trace of one stage of a pipeline: one micro-batch forward and backward, as the schedules of torch run it.

What a stage receives, activations and gradients, lies in buffers that are there all the time, and is not on the trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from bench.core import processes
from bench.models import Family, float8
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.experts import find_spread_experts
from bench.models.pipeline_stage import PipelineStageModule
from bench.optimizers.updated_tensor import find_hidden_matrices
from bench.prediction.trace.compiled_blocks import compile_blocks
from bench.prediction.trace.device_operators import use_device_operators
from bench.prediction.trace.fake_process_group import split_model
from bench.prediction.trace.fake_tensors import TracingFakeTensorMode
from bench.prediction.trace.overlapped_exchanges import overlap_exchanges
from bench.prediction.trace.ring_attention import trace_ring_attention
from bench.prediction.trace.step_trace import (
    build_traced_loss,
    fill_with_fake_tensors,
    locate_parameters,
)
from bench.prediction.trace.trace import (
    LOSS_PLACE,
    BlockPlace,
    GradientEvent,
    LocatedParameter,
    Trace,
    TraceKey,
    TraceSegment,
    sort_simultaneous_frees,
)
from bench.prediction.trace.trace_recorder import TraceRecorder
from bench.prediction.trace.traced_blocks import (
    StageBlocks,
    StageTraceKey,
    is_stage_traced_whole,
    shorten_staged_family,
)
from bench.strategies.plan_inputs import ParameterSpec
from bench.strategies.tensor_parallel.split import TensorParallelSplit, find_local_shape, localize_parameters


@dataclass(frozen=True)
class ShortStage:
    """A stage with few blocks, on meta, as it is traced."""

    family: Family
    """Of the short model that it is made of."""
    block_counts: tuple[int, ...]
    """Of its lists."""
    model: nn.Module
    stage: PipelineStageModule
    group_kinds: Mapping[str, str]
    """As `split_model` yields them."""


@contextlib.contextmanager
def open_short_stage(key: StageTraceKey) -> Iterator[ShortStage]:
    """Within, a stage can be run with fake tensors, as the first of the ranks that share its layers has it."""
    trace_key = key.trace_key
    is_whole = is_stage_traced_whole(trace_key)
    short_family = (None if is_whole else shorten_staged_family(trace_key.family)) or trace_key.family
    model = short_family.build_model()
    block_counts = tuple(len(blocks) for blocks in short_family.find_block_lists(model))
    model.train()
    if trace_key.precision.uses_torchao:
        float8.convert_to_float8(short_family, model, trace_key.precision)
    checkpoint_blocks(
        short_family, model, trace_key.activation_checkpointing, sequence_length=trace_key.sequence_length
    )
    split = trace_key.split
    with split_model(split, short_family, model, keeps_dtensors=True) as group_kinds:
        stage = _build_stage(short_family, model, key.stage_blocks, is_whole=is_whole)
        if split is not None:
            split.prepare_stage(model, stage, is_first=_has_first_block(key))
            if not split.keeps_dtensors:
                localize_parameters(stage)
        yield ShortStage(short_family, block_counts, model, stage, group_kinds)


def _has_first_block(key: StageTraceKey) -> bool:
    return key.stage_blocks[0].list_index == 0 and key.stage_blocks[0].has_first_block


def _has_last_block(key: StageTraceKey, num_lists: int) -> bool:
    return key.stage_blocks[-1].list_index == num_lists - 1 and key.stage_blocks[-1].has_last_block


def _build_stage(
    short_family: Family, model: nn.Module, stage_blocks: tuple[StageBlocks, ...], *, is_whole: bool
) -> PipelineStageModule:
    block_counts = [len(blocks) for blocks in short_family.find_block_lists(model)]
    if is_whole:
        assert stage_blocks[0].first_position is not None
        start = sum(block_counts[: stage_blocks[0].list_index]) + stage_blocks[0].first_position
        num_blocks = sum(blocks.num_blocks for blocks in stage_blocks)
        return short_family.build_stage(model, range(start, start + num_blocks))
    first_blocks, last_blocks = stage_blocks[0], stage_blocks[-1]
    num_first = short_family.num_first_blocks
    start = sum(block_counts[: first_blocks.list_index])
    if first_blocks.first_position is not None and first_blocks.first_position < num_first:
        start += first_blocks.first_position
    elif not first_blocks.has_first_block:
        num_list_blocks = block_counts[first_blocks.list_index]
        start += num_list_blocks - first_blocks.num_blocks if first_blocks.has_last_block else num_first
    reaches_list_end = last_blocks.has_last_block
    stop = sum(block_counts[: last_blocks.list_index]) + (
        block_counts[last_blocks.list_index]
        if reaches_list_end
        else (start - sum(block_counts[: last_blocks.list_index]) if last_blocks is first_blocks else 0)
        + last_blocks.num_blocks
    )
    stage = short_family.build_stage(model, range(start, stop))
    for blocks, list_blocks in zip(stage.block_lists, stage_blocks, strict=True):
        del blocks[list_blocks.num_blocks - 1 : len(blocks) - 1]
    return stage


def find_handover_dtype(key: TraceKey) -> torch.dtype:
    """Format of what stages hand over."""
    return key.precision.parameter_dtype if key.autocast else key.precision.compute_dtype


def trace_stage(key: StageTraceKey, batch_size: int) -> Trace:
    """Trace a micro-batch of some size through a stage, forward and backward."""
    with open_short_stage(key) as short_stage:
        return _trace_stage(key, short_stage, batch_size)


def _trace_stage(key: StageTraceKey, short_stage: ShortStage, batch_size: int) -> Trace:
    # It brings the compiler along, half a second; and tensors, which are not the stage's.
    from torch.distributed.pipelining._backward import stage_backward

    trace_key, family, stage = key.trace_key, short_stage.family, short_stage.stage
    split = trace_key.split
    local_length = trace_key.sequence_length // (1 if split is None else split.handover_parts)
    parameters, block_counts = _list_traced_parameters(stage, split), short_stage.block_counts
    is_first, is_last = _has_first_block(key), _has_last_block(key, len(block_counts))
    first_block = sum(block_counts[: key.stage_blocks[0].list_index]) + (
        0 if key.stage_blocks[0].has_first_block else 1
    )
    next_block = sum(block_counts[: key.stage_blocks[-1].list_index]) + (
        block_counts[key.stage_blocks[-1].list_index] if key.stage_blocks[-1].has_last_block else 1
    )

    def make_handover_tensors(block: int, requires_grad: bool) -> tuple[torch.Tensor, ...]:
        shapes = family.find_stage_input_shapes(block, local_length)
        tensor_options: dict[str, Any] = {"dtype": find_handover_dtype(trace_key), "requires_grad": requires_grad}
        return tuple(torch.empty(batch_size, *shape, **tensor_options) for shape in shapes)

    if trace_key.compile:
        compile_blocks(stage.block_lists, stage, split)
    compute_loss = build_traced_loss(trace_key, family)
    trace_recorder = TraceRecorder(trace_key, batch_size)
    trace_recorder.op_recorder.group_kinds = short_stage.group_kinds
    with (
        processes.pause_garbage_collection(),
        TracingFakeTensorMode(),
        use_device_operators(trace_key.device),
        trace_ring_attention(trace_key, trace_recorder.op_recorder),
        trace_recorder.op_recorder,
        trace_recorder.track_rng_states(),
    ):
        fill_with_fake_tensors(stage, family, trace_key)
        _watch_stage(trace_recorder, stage)
        received_activations = () if is_first else make_handover_tensors(first_block, True)
        output_gradients = None if is_last else make_handover_tensors(next_block, False)
        (batch,) = trace_recorder.make_inputs(
            [lambda: family.build_batch(batch_size, trace_key.sequence_length, torch.Generator())]
        )
        if split is not None:
            batch = split.select_tokens(short_stage.model, batch)
        trace_recorder.enter_phase("forward")
        with _enter_autocast(trace_key):
            stage_output = stage(*received_activations, **batch.inputs)
        outputs = stage_output if isinstance(stage_output, tuple) else (stage_output,)
        received_storages = {tensor.untyped_storage()._cdata for tensor in received_activations}
        produced_bytes = sum(
            output.nbytes for output in outputs if output.untyped_storage()._cdata not in received_storages
        )
        loss = None
        if is_last:
            trace_recorder.start_segment("forward", LOSS_PLACE)
            outputs[0].register_hook(lambda _gradient: trace_recorder.start_segment("backward", None))
            loss = compute_loss(outputs[0], batch.labels) / 1
        trace_recorder.start_segment("backward", LOSS_PLACE if is_last else None)
        inputs = [*received_activations, *batch.inputs.values()]
        input_gradients = stage_backward(loss if is_last else outputs, output_gradients, inputs)
        trace_recorder.start_segment("backward", None)
        del stage_output, outputs, loss, input_gradients
        trace_recorder.op_recorder.close()
    gradient_sizes = {
        name: find_local_shape(parameter).numel() * parameter.element_size()
        for parameter, (_, name) in _list_located_parameters(stage)
    }
    for segment in trace_recorder.segments:
        segment.gradients = [
            _move_past_free(segment, event, gradient_sizes[event.parameter]) for event in segment.gradients
        ]
        sort_simultaneous_frees(segment)
    if split is not None and split.overlaps_exchanges:
        overlap_exchanges(trace_recorder.segments)
    return Trace(trace_recorder.segments, trace_recorder.inputs_bytes, produced_bytes, parameters=parameters)


def _move_past_free(segment: TraceSegment, event: GradientEvent, size: int) -> GradientEvent:
    """A gradient leaves the trace a moment after it is complete: no sooner is it the strategy's."""
    next_change = segment.changes[event.position : event.position + 1]
    if next_change and next_change[0][0] == -size:
        return dataclasses.replace(event, position=event.position + 1)
    return event


def _list_traced_parameters(
    stage: PipelineStageModule, split: TensorParallelSplit | None
) -> tuple[LocatedParameter, ...]:
    hidden_matrix_ids = {id(matrix) for matrix in find_hidden_matrices(stage.block_lists)}
    expert_ids = find_spread_experts(stage, 1 if split is None else split.expert_degree)
    return tuple(
        (
            place,
            ParameterSpec(
                name,
                tuple(find_local_shape(parameter)),
                is_trained=parameter.requires_grad,
                is_hidden_matrix=id(parameter) in hidden_matrix_ids,
                is_expert=id(parameter) in expert_ids,
            ),
        )
        for parameter, (place, name) in _list_located_parameters(stage)
    )


def _list_located_parameters(stage: PipelineStageModule) -> list[tuple[torch.Tensor, tuple[BlockPlace, str]]]:
    locations = locate_parameters(stage.block_lists, stage)
    return [(parameter, locations[id(parameter)]) for parameter in stage.parameters()]


def _watch_stage(trace_recorder: TraceRecorder, stage: PipelineStageModule) -> None:
    locations = locate_parameters(stage.block_lists, stage)
    for index, blocks in enumerate(stage.block_lists):
        for position, block in enumerate(blocks):
            trace_recorder.watch_block(block, (index, position), is_last=position == len(blocks) - 1)
    for parameter in filter(attrgetter("requires_grad"), stage.parameters()):
        parameter.register_post_accumulate_grad_hook(trace_recorder.build_gradient_hook(locations[id(parameter)][1]))


def _enter_autocast(trace_key: TraceKey) -> contextlib.AbstractContextManager[Any]:
    if trace_key.precision.is_mixed and trace_key.autocast:
        return torch.autocast("cpu", trace_key.precision.compute_dtype)
    return contextlib.nullcontext()
