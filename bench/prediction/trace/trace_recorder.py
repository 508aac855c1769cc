"""Sorts what a traced step does into segments, cut where blocks and phases begin; notes complete gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from bench.models import Batch, Family
from bench.models.division import strip_checkpoint_wrappers
from bench.prediction.trace.compiled_blocks import find_compiled_part
from bench.prediction.trace.cpu_memory import track_rng_states
from bench.prediction.trace.kernel_calls import round_operands
from bench.prediction.trace.kernels import WIDE_BATCH, KernelRecord
from bench.prediction.trace.op_recorder import OpRecorder
from bench.prediction.trace.trace import (
    LOSS_PLACE,
    TO_DEVICE,
    TO_HOST,
    BlockPlace,
    CollectiveEvent,
    GradientEvent,
    LayerPassEvent,
    TraceKey,
    TraceSegment,
)
from bench.strategies.step_plan import TENSOR_GROUP


class TracedTransfer:
    """Stands for copies to a host that has another memory than the device."""

    def __init__(self, trace_recorder: TraceRecorder) -> None:
        self._trace_recorder = trace_recorder

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """On meta, seen by nobody."""
        with _disable_current_modes():
            on_meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            host_copy = torch.empty_like(on_meta)
        self._trace_recorder.note_collective(TO_HOST, host_copy.nbytes)
        return host_copy

    def copy_to_device(self, host_copy: torch.Tensor, device: torch.device) -> torch.Tensor:
        self._trace_recorder.note_collective(TO_DEVICE, host_copy.nbytes)
        return torch.empty_strided(host_copy.shape, host_copy.stride(), dtype=host_copy.dtype, device=device)


class TraceRecorder:
    """Sorts what the recorder sees into segments."""

    def __init__(self, key: TraceKey, batch_size: int) -> None:
        on_cpu = key.device == "cpu"
        self.segments: list[TraceSegment] = []
        self.inputs_bytes = self.outputs_bytes = self.logits_bytes = 0
        self._on_cpu = on_cpu
        self._rounds_operands = key.precision.uses_transformer_engine
        self.op_recorder = OpRecorder(
            self._note_memory_change,
            self._note_kernel,
            self.note_collective,
            on_cpu=on_cpu,
            counts_growing_bytes=batch_size == WIDE_BATCH,
        )
        self._micro_batch = -1
        self._counting_inputs = False
        self._gradient_storages: dict[tuple[int, str], int] = {}
        """Number of each complete gradient's storage, by the segment and the parameter."""

    def track_rng_states(self) -> contextlib.AbstractContextManager[None]:
        """Around what is recorded: on a CPU, what keeps the state of random numbers does so in the same memory."""
        return track_rng_states(self.op_recorder.track_storage) if self._on_cpu else contextlib.nullcontext()

    def make_inputs(self, batch_factories: list[Callable[[], Batch]]) -> list[Batch]:
        """Make the micro-batches, counting what they take."""
        self._counting_inputs = True
        batches = [make_batch() for make_batch in batch_factories]
        self._counting_inputs = False
        return batches

    def start_first_segment(self) -> None:
        """Before the first micro-batch's forward pass begins, as a part of it."""
        self.segments.append(TraceSegment("forward", 0, None))

    def enter_phase(self, phase: str) -> None:
        if phase == "forward":
            self._micro_batch += 1
        self.start_segment(phase, LOSS_PLACE if phase == "backward" else None)

    def watch_model(self, family: Family, model: nn.Module, locations: dict[int, tuple[BlockPlace, str]]) -> None:
        """Cut where a block's forward and backward begin and a list of blocks ends; note complete gradients."""
        for index, blocks in enumerate(family.find_block_lists(model)):
            for position, block in enumerate(blocks):
                self.watch_block(block, (index, position), is_last=position == len(blocks) - 1)
        model.register_forward_hook(self._note_outputs)
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(self.build_gradient_hook(locations[id(parameter)][1]))

    def watch_block(self, block: nn.Module, place: tuple[int, int], *, is_last: bool) -> None:
        """Cut where its forward and its backward begin, behind the last block of a list, and before the first."""

        def start_forward(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.start_segment("forward", place)
            if place[1] == 0 and inputs[0].requires_grad and not inputs[0].is_leaf:  # no backward above what is frozen
                inputs[0].register_hook(lambda _gradient: self.start_segment("backward", None))

        def end_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if is_last:
                self.start_segment("forward", None)
            hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: self.start_segment("backward", place))

        block.register_forward_pre_hook(start_forward)
        block.register_forward_hook(end_forward)

    def watch_layers(self, family: Family, model: nn.Module, layers: set[nn.Module]) -> None:
        """Note where the passes of layers that are sharded by themselves begin and end; of layers within compiled
        parts of blocks, where those of the parts do."""
        for list_index, blocks in enumerate(family.find_block_lists(model)):
            for position, block in enumerate(blocks):
                for name, layer in block.named_modules():
                    if layer in layers:
                        watched_module = find_compiled_part(block, layer) or layer
                        self._watch_layer(
                            (list_index, position), layer, strip_checkpoint_wrappers(name), watched_module
                        )

    def _watch_layer(self, place: BlockPlace, layer: nn.Module, name: str, watched_module: nn.Module) -> None:
        def note_pass(kind: str) -> None:
            # Gradients of a block that is compiled as a whole are added up when what is before it has begun.
            segment = next(segment for segment in reversed(self.segments) if segment.place == place)
            counts = len(segment.changes), len(segment.kernels), len(segment.gradients)
            segment.visits.append(LayerPassEvent(*counts, name, kind))

        gradients = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        ends_with_gradient = len(gradients) == 1  # its input's may be added to others', and is complete later
        if ends_with_gradient:
            gradients[0].register_post_accumulate_grad_hook(lambda _parameter: note_pass("after_backward"))

        def start_forward(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            note_pass("before_forward")
            if inputs[0].requires_grad and not ends_with_gradient:
                inputs[0].register_hook(lambda _gradient: note_pass("after_backward"))

        def end_forward(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            note_pass("after_forward")
            hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: note_pass("before_backward"))

        watched_module.register_forward_pre_hook(start_forward)
        watched_module.register_forward_hook(end_forward)

    def _note_outputs(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.start_segment("forward", LOSS_PLACE)
        self.outputs_bytes = sum(tensor.nbytes for tensor in output.values() if isinstance(tensor, torch.Tensor))
        self.logits_bytes = output["logits"].nbytes
        output["logits"].register_hook(lambda _gradient: self.start_segment("backward", None))

    def build_gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        """A hook that notes a complete gradient, which then leaves the trace."""

        def note_gradient(parameter: torch.Tensor) -> None:
            segment = self.segments[-1]
            segment.gradients.append(GradientEvent(len(segment.changes), len(segment.kernels), name))
            if parameter.grad is not None:
                self._gradient_storages[id(segment), name] = self.op_recorder.find_storage_number(parameter.grad)
            parameter.grad = None

        return note_gradient

    def start_segment(self, phase: str, place: BlockPlace) -> None:
        self.segments.append(TraceSegment(phase, self._micro_batch, place))

    def _note_memory_change(self, size: int, number: int) -> None:
        if self._counting_inputs:
            self.inputs_bytes += size
        elif self.segments:
            self.segments[-1].changes.append((size, number))

    def _note_kernel(self, kernel: KernelRecord) -> None:
        if not self.segments or self._counting_inputs:
            return
        segment = self.segments[-1]
        if self._rounds_operands and segment.place not in (None, LOSS_PLACE):
            kernel = round_operands(kernel)
        segment.kernels.append(kernel)

    def note_collective(self, kind: str, size: int, group: str = TENSOR_GROUP) -> Callable[[], None] | None:
        """Returns what notes that computation waits for it only now."""
        if not self.segments or self._counting_inputs:
            return None
        segment = self.segments[-1]
        index = len(segment.collectives)
        segment.collectives.append(CollectiveEvent(len(segment.kernels), kind, size, group))

        def note_wait() -> None:
            waited_kernel = len(segment.kernels) if segment is self.segments[-1] else None
            segment.collectives[index] = dataclasses.replace(segment.collectives[index], waited_kernel=waited_kernel)

        return note_wait

    def free_gradients_at_events(self) -> None:
        """Let every gradient leave the trace right behind the event that completes it.

        Autograd lets go of it a moment later, when the next block's backward may have begun. By then it is the
        strategy's, which would count it a second time.
        """
        gradient_numbers = set(self._gradient_storages.values())
        late_frees = {
            change
            for segment in self.segments
            for change in segment.changes
            if change[0] < 0 and change[1] in gradient_numbers
        }
        frees_by_number = {number: [(size, number)] for size, number in late_frees}
        for segment in self.segments:
            changes: list[tuple[int, int]] = []
            moved_events: list[GradientEvent | LayerPassEvent] = []
            start = 0
            for event in segment.events:
                changes += [change for change in segment.changes[start : event.position] if change not in late_frees]
                start = event.position
                moved_events.append(dataclasses.replace(event, position=len(changes)))
                if isinstance(event, GradientEvent):
                    changes += frees_by_number.get(self._gradient_storages.get((id(segment), event.parameter), 0), [])
            segment.changes = changes + [change for change in segment.changes[start:] if change not in late_frees]
            segment.gradients = [event for event in moved_events if isinstance(event, GradientEvent)]
            segment.visits = [event for event in moved_events if isinstance(event, LayerPassEvent)]
