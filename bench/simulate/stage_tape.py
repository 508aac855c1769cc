"""The tape of one stage of a pipeline: one micro-batch forward and backward, as the schedules of torch run it.

What a stage receives, activations and gradients, lies in buffers that are there all the time, and is not on the tape.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward

from bench import collector
from bench.models import Family
from bench.models.blocks import checkpoint_blocks
from bench.models.stages import Stage
from bench.simulate.cuda_operators import operators_of
from bench.simulate.tape import (
    LOSS,
    TRACED_BLOCKS,
    GradientEvent,
    Place,
    Recording,
    Segment,
    TapeKey,
    Trace,
    fill,
    order_releases,
)

SPARE_BLOCKS = 2
"""Beyond those that are traced: an inner stage needs a block before it and one behind."""


@dataclass(frozen=True)
class Part:
    """The blocks of one list that a stage has."""

    index: int
    """Of the list."""
    count: int
    """Number of blocks: no more than are traced, where it stands for a tape."""
    at_start: bool
    at_end: bool


@dataclass(frozen=True)
class StageKey:
    """Everything the tape of a stage depends on but the size of a micro-batch."""

    tape: TapeKey
    parts: tuple[Part, ...]


def parts_of(lengths: tuple[int, ...], blocks: range) -> tuple[Part, ...]:
    """What a stage has of each list of blocks.

    Parameters
    ----------
    lengths: tuple of int
        Blocks per list of the whole model.
    blocks: range
        The stage's, counted over all lists.
    """
    bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    found = []
    for index, (start, end) in enumerate(pairwise(bounds)):
        first, last = max(start, blocks.start), min(end, blocks.stop)
        if first < last:
            found.append(Part(index, last - first, first == start, last == end))
    return tuple(found)


def traced(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The stage that is traced in a stage's place: long lists are shortened."""
    return tuple(Part(part.index, min(part.count, TRACED_BLOCKS), part.at_start, part.at_end) for part in parts)


def small_stage(family: Family, parts: tuple[Part, ...], checkpointing: str = "none") -> tuple[Family, Stage]:
    """A stage with few blocks, on meta, and the family of the short model it is made of."""
    small = family.shortened(TRACED_BLOCKS + SPARE_BLOCKS) or family
    model = small.build()
    model.train()
    lengths = [len(blocks) for blocks in small.block_lists(model)]
    checkpoint_blocks(small, model, checkpointing)
    first, last = parts[0], parts[-1]
    start = sum(lengths[: first.index])
    if not first.at_start:
        start += lengths[first.index] - first.count if first.at_end else 1
    whole = last.at_end
    stop = sum(lengths[: last.index]) + (
        lengths[last.index] if whole else (start - sum(lengths[: last.index]) if last is first else 0) + last.count
    )
    stage = small.stage(model, range(start, stop))
    for blocks, part in zip(stage.block_lists, parts, strict=True):
        del blocks[part.count - 1 : len(blocks) - 1]
    return small, stage


def stage_names(stage: Stage) -> dict[int, tuple[Place, str]]:
    """Per parameter, by its identity: its block and its name there (outside blocks: in the stage)."""
    found: dict[int, tuple[Place, str]] = {}
    for index, blocks in enumerate(stage.block_lists):
        for position, block in enumerate(blocks):
            for name, parameter in block.named_parameters():
                found[id(parameter)] = ((index, position), name)
    for name, parameter in stage.named_parameters():
        found.setdefault(id(parameter), (None, name))
    return found


def handed_dtype(key: TapeKey) -> torch.dtype:
    """Format of what stages hand over."""
    return key.precision.parameter_dtype if key.autocast else key.precision.compute_dtype


def record_stage(key: StageKey, batch_size: int) -> Trace:
    """Trace a micro-batch of some size through a stage, forward and backward."""
    tape = key.tape
    family, stage = small_stage(tape.family, key.parts, tape.activation_checkpointing)
    is_first = key.parts[0].index == 0 and key.parts[0].at_start
    lengths = [len(blocks) for blocks in family.block_lists(family.build())]
    is_last = key.parts[-1].index == len(lengths) - 1 and key.parts[-1].at_end
    first_block = sum(lengths[: key.parts[0].index]) + (0 if key.parts[0].at_start else 1)
    next_block = sum(lengths[: key.parts[-1].index]) + (lengths[key.parts[-1].index] if key.parts[-1].at_end else 1)

    def handed(block: int, requires_grad: bool) -> tuple[torch.Tensor, ...]:
        shapes = family.handed_over(block, tape.sequence_length)
        make: dict[str, Any] = {"dtype": handed_dtype(tape), "requires_grad": requires_grad}
        return tuple(torch.empty(batch_size, *shape, **make) for shape in shapes)

    recording = Recording(on_cpu=tape.device == "cpu")
    with (
        collector.at_rest(),
        FakeTensorMode(),
        operators_of(tape.device),
        recording.recorder,
        recording.noting_random_states(),
    ):
        fill(stage, family, tape)
        _watch(recording, stage)
        received = () if is_first else handed(first_block, True)
        gradients = None if is_last else handed(next_block, False)
        (batch,) = recording.inputs([lambda: family.batch(batch_size, tape.sequence_length, torch.Generator())])
        recording.enter_phase("forward")
        with _autocast(tape):
            result = stage(*received, **batch.inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        theirs = {tensor.untyped_storage()._cdata for tensor in received}
        own_bytes = sum(each.nbytes for each in outputs if each.untyped_storage()._cdata not in theirs)
        loss = None
        if is_last:
            recording.cut("forward", LOSS)
            outputs[0].register_hook(lambda _gradient: recording.cut("backward", None))
            loss = family.loss(outputs[0], batch.labels) / 1
        recording.cut("backward", LOSS if is_last else None)
        inputs = [*received, *batch.inputs.values()]
        sent = stage_backward(loss if is_last else outputs, gradients, inputs)
        recording.cut("backward", None)
        del result, outputs, loss, sent
        recording.recorder.close()
    if tape.compile:
        recording.fuse()
    sizes = {name: parameter.nbytes for parameter, (_, name) in _named(stage)}
    for segment in recording.segments:
        segment.gradients = [_when_released(segment, event, sizes[event.parameter]) for event in segment.gradients]
        order_releases(segment)
    return Trace(recording.segments, recording.inputs_bytes, own_bytes)


def _when_released(segment: Segment, event: GradientEvent, size: int) -> GradientEvent:
    """A gradient leaves the tape a moment after it is complete: no sooner is it the strategy's."""
    following = segment.changes[event.position : event.position + 1]
    if following and following[0][0] == -size:
        return dataclasses.replace(event, position=event.position + 1)
    return event


def _named(stage: Stage) -> list[tuple[torch.Tensor, tuple[Place, str]]]:
    names = stage_names(stage)
    return [(parameter, names[id(parameter)]) for parameter in stage.parameters()]


def _watch(recording: Recording, stage: Stage) -> None:
    names = stage_names(stage)
    for index, blocks in enumerate(stage.block_lists):
        for position, block in enumerate(blocks):
            recording.watch_block(block, (index, position), is_last=position == len(blocks) - 1)
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(recording.completing(names[id(parameter)][1]))


def _autocast(tape: TapeKey) -> contextlib.AbstractContextManager[Any]:
    if tape.precision.mixed and tape.autocast:
        return torch.autocast("cpu", tape.precision.compute_dtype)
    return contextlib.nullcontext()
