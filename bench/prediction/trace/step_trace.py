"""Records the trace of one step: the real step (`bench.rank.engine.Engine.step`) of the real model, on fake tensors.

On one device and without an optimizer. Blocks repeat: the model is traced with few of them, and the inner ones stand
for all the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.core import processes
from bench.core.precision import Precision
from bench.models import Family, float8
from bench.models.activation_offload import PinnedTransfer, offload_activations
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.blocks import find_trained_layers
from bench.models.checkpointing import BlockPositions
from bench.models.chunked_loss import ChunkedLoss
from bench.models.compiled_loss import LossModule
from bench.models.experts import list_experts
from bench.models.materialize import fill_buffers
from bench.prediction.trace.compiled_blocks import compile_blocks, compile_module
from bench.prediction.trace.device_operators import use_device_operators
from bench.prediction.trace.fake_process_group import join_fake_process_group, split_model
from bench.prediction.trace.fake_tensors import TracingFakeTensorMode
from bench.prediction.trace.overlapped_exchanges import overlap_exchanges
from bench.prediction.trace.ring_attention import trace_ring_attention
from bench.prediction.trace.trace import (
    END_PHASE,
    BlockPlace,
    Trace,
    TraceKey,
    sort_simultaneous_frees,
)
from bench.prediction.trace.trace_recorder import TracedTransfer, TraceRecorder
from bench.prediction.trace.traced_blocks import shorten_for_trace
from bench.rank.engine import Engine, disable_autocast
from bench.strategies import Stepper
from bench.strategies.tensor_parallel.split import find_local_shape, wrap_like_dtensor


def trace_step(key: TraceKey, batch_size: int, *, whole_model: bool = False) -> Trace:
    """Trace one step on fake tensors.

    Parameters
    ----------
    key: TraceKey
        What to trace.
    batch_size: int
        Sequences per micro-batch.
    whole_model: bool
        Trace all blocks.
    """
    period = key.block_period
    family = (None if whole_model else shorten_for_trace(key.family, period)) or key.family
    model = family.build_model()
    model.train()
    if key.precision.uses_torchao:
        float8.convert_to_float8(family, model, key.precision)
    if key.precision.scales_loss and key.autocast:
        disable_autocast(family.find_fp32_modules(model), torch.device("cpu"))
    block_positions = None if period == 1 else find_block_positions(family, key.family, period)
    checkpoint_blocks(family, model, key.activation_checkpointing, block_positions, sequence_length=key.sequence_length)
    trace_recorder = TraceRecorder(key, batch_size)
    chunked_loss = None if key.loss_chunks is None else ChunkedLoss(family, model, key.loss_chunks)
    with (
        (
            split_model(key.split, family, model) if key.num_ranks == 1 else join_fake_process_group(key.num_ranks)
        ) as group_kinds,
        processes.pause_garbage_collection(),
        TracingFakeTensorMode(),
        use_device_operators(key.device),
        trace_ring_attention(key, trace_recorder.op_recorder),
        trace_recorder.op_recorder,
        trace_recorder.track_rng_states(),
    ):
        trace_recorder.op_recorder.group_kinds = group_kinds or {}
        if key.compile:
            compile_blocks(family.find_block_lists(model), model, key.split)
        if key.activation_offload:
            transfer = PinnedTransfer() if key.device == "cpu" else TracedTransfer(trace_recorder)
            offload_activations(family, model, transfer)
        fill_with_fake_tensors(model, family, key)
        locations = locate_parameters(family.find_block_lists(model), model)
        trace_recorder.watch_model(family, model, locations)
        if key.shards_fp32_separately:
            trace_recorder.watch_layers(family, model, set(family.find_fp32_modules(model)))
        if key.shards_trained_separately:
            trace_recorder.watch_layers(family, model, set(find_trained_layers(family, model)))
        if key.shards_experts_separately:
            trace_recorder.watch_layers(family, model, set(list_experts(model)))
        if key.widens_outputs:
            model.register_forward_hook(_convert_logits_to_fp32)
        engine = Engine(
            module=model,
            stepper=_TracingStepper(trace_recorder),
            strategy=_StubStrategy(key.autocast, key.autocast_caches),  # type: ignore[arg-type]
            precision=key.precision,
            device=torch.device("cpu"),
            synchronize_every_micro_batch=False,
            enter_phase=trace_recorder.enter_phase,
            loss=build_traced_loss(key, family),
            chunked_loss=chunked_loss,
        )
        batch_factories = [
            lambda: family.build_batch(batch_size, key.sequence_length, torch.Generator())
        ] * key.micro_batches
        micro_batches = whole_batches = trace_recorder.make_inputs(batch_factories)
        if key.split is not None and key.split.context_degree > 1:
            trace_recorder.start_first_segment()
            micro_batches = [key.split.select_tokens(model, batch) for batch in whole_batches]
        with _enter_gpu_autocast(key):
            loss = engine.step(micro_batches)
        del micro_batches  # but not the whole ones, which are there all the time
        trace_recorder.op_recorder.close()
        del loss
    for segment in trace_recorder.segments:
        sort_simultaneous_frees(segment)
    trace_recorder.free_gradients_at_events()
    if key.split is not None and key.split.overlaps_exchanges:
        overlap_exchanges(trace_recorder.segments)
    return Trace(
        trace_recorder.segments, trace_recorder.inputs_bytes, trace_recorder.outputs_bytes, trace_recorder.logits_bytes
    )


def build_traced_loss(key: TraceKey, family: Family) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The loss of logits and labels on the rank that is traced."""
    loss = family.compute_loss if key.split is None else key.split.build_loss(family)
    if not key.compiles_loss:
        return loss
    module = LossModule(loss)
    compile_module(module)
    return module


def find_block_positions(short_family: Family, family: Family, period: int) -> list[BlockPositions]:
    """Where the blocks of a shortened model stand in the whole one, for each list."""
    counts, short_counts = (
        [len(blocks) for blocks in one_family.find_block_lists(one_family.build_model())]
        for one_family in (family, short_family)
    )
    return [
        BlockPositions(num_blocks, num_traced, period)
        for num_blocks, num_traced in zip(counts, short_counts, strict=True)
    ]


def _enter_gpu_autocast(key: TraceKey) -> contextlib.AbstractContextManager[None]:
    """What torchao's layers look at."""
    if key.precision.uses_torchao and key.autocast and key.device != "cpu":
        return float8.enable_cuda_autocast(key.precision.compute_dtype)
    return contextlib.nullcontext()


def locate_parameters(
    block_lists: Iterable[Iterable[nn.Module]], model: nn.Module
) -> dict[int, tuple[BlockPlace, str]]:
    """Per parameter of a model, or of a stage of one, by its identity: the block it belongs to and its name there
    (outside blocks: in the model or the stage)."""
    locations: dict[int, tuple[BlockPlace, str]] = {}
    for index, blocks in enumerate(block_lists):
        for position, block in enumerate(blocks):
            for name, parameter in block.named_parameters():
                locations[id(parameter)] = ((index, position), name)
    for name, parameter in model.named_parameters():
        locations.setdefault(id(parameter), (None, name))
    return locations


def fill_with_fake_tensors(model: nn.Module, family: Family, key: TraceKey) -> None:
    """Give the model, which is on meta, fake buffers, and fake parameters of the format it computes with."""
    fp32_modules = [*family.list_layers_stored_in_fp32(model)]
    fp32_modules += family.find_fp32_modules(model) if key.precision.scales_loss else ()
    fp32_submodules = {inner for module in fp32_modules for inner in module.modules()}
    cast_dtype = key.precision.parameter_dtype if key.autocast else key.precision.compute_dtype
    fake_parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        dtype = torch.float32 if module in fp32_submodules else cast_dtype
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in fake_parameters:
                fake = torch.empty(find_local_shape(parameter), dtype=dtype, device="cpu")
                fake_parameters[id(parameter)] = nn.Parameter(
                    wrap_like_dtensor(parameter, fake), requires_grad=parameter.requires_grad
                )
            setattr(module, name, fake_parameters[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
        fill_buffers(module, family, torch.device("cpu"))
        family.convert_drawn_parameters(module)


def _convert_logits_to_fp32(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """What some frameworks do to a model's outputs."""
    outputs["logits"] = outputs["logits"].float()
    return outputs


@dataclass(frozen=True)
class _StubStrategy:
    """Stands for a strategy in the engine: all a strategy does apart from wrapping and communicating."""

    autocast: bool
    has_autocast_cache: bool

    def uses_autocast(self, _precision: Precision) -> bool:
        return self.autocast

    @contextlib.contextmanager
    def control_gradient_sync(self, _module: nn.Module, synchronize: bool) -> Iterator[None]:
        """Gradients leave the trace as soon as they are complete."""
        yield


class _TracingStepper(Stepper):
    """Cuts where the backward pass is over: what strategies do last of all they do before logits and loss are gone."""

    def __init__(self, trace_recorder: TraceRecorder) -> None:
        super().__init__(_StubOptimizer(), torch.amp.GradScaler(enabled=False), keep_gradients=False)  # type: ignore[arg-type]
        self._trace_recorder = trace_recorder

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self._trace_recorder.start_segment(END_PHASE, None)


class _StubOptimizer:
    """Stands for the optimizer, which works on what a strategy stores."""

    def step(self) -> None:
        """Nothing to update."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to free."""
