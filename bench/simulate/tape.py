"""The tape of one training step: what the model itself computes and allocates, whatever strategy wraps it.

A tape is made by running the real step (`bench.training.engine.Engine.step`) of the real model on fake tensors, on one
device and without an optimizer. It is cut where blocks begin, so that a strategy's actions can be put in between.
Blocks repeat: the model is traced with few of them, and the inner ones stand for all the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import collector
from bench.models import Batch, Family, float8
from bench.models.blocks import checkpoint_blocks
from bench.models.division import unwrapped
from bench.models.materialize import fill_buffers
from bench.precision import Precision
from bench.simulate.cpu_memory import noting_random_states
from bench.simulate.cuda_operators import operators_of
from bench.simulate.fusion import Use, fused
from bench.simulate.lone import split_over
from bench.simulate.recorder import Kernel, Recorder, Uses
from bench.strategies import Stepper
from bench.strategies.split import Split, as_part_of, own_shape
from bench.training.engine import Engine, keep_out_of_autocast

TRACED_BLOCKS = 4
"""Blocks per list that are traced: the first, two inner ones, which must be alike, and the last."""

Place = tuple[int, int] | None
"""Block list and position in it; None for what lies outside the blocks."""

LOSS = (-1, 0)
"""The place of what the step does with the model's output, outside the model."""


END = "end"
"""The phase between a backward pass and what comes next, in which logits and loss are let go."""


@dataclass(frozen=True)
class TapeKey:
    """Everything a tape depends on but the batch size."""

    family: Family
    sequence_length: int
    precision: Precision
    autocast: bool
    """Mixed precision by autocast; else parameters are cast before they are used, as FSDP does."""
    activation_checkpointing: str
    micro_batches: int
    """1, or 2 where gradients accumulate: the second stands for all later ones."""
    device: str
    """cpu or cuda: whose attention kernels."""
    compile: bool = False
    """Blocks' kernels are fused."""
    widens_outputs: bool = False
    """The model's outputs are converted to fp32."""
    split: Split | None = None
    """Over how many ranks every layer is split."""
    autocast_caches: bool = True
    """Autocast keeps what it casts of parameters until the forward pass is over."""
    fp32_apart: bool = False
    """Layers that stay in fp32 in fp16 runs are sharded by themselves, within their blocks."""


@dataclass(frozen=True)
class CollectiveEvent:
    """Ranks that share a layer exchange something, and computation waits for it."""

    kernel: int
    """Kernels of the segment started by then."""
    kind: str
    """all-reduce, all-gather or reduce-scatter."""
    size: int
    """Bytes of the whole."""


@dataclass(frozen=True)
class GradientEvent:
    """A parameter's gradient is complete and leaves the tape: the strategy decides what becomes of it."""

    position: int
    """Changes of the segment before it happens."""
    kernel: int
    """Kernels of the segment started by then."""
    parameter: str
    """Name within the block, or in the model for what lies outside."""


@dataclass(frozen=True)
class Visit:
    """The pass of a layer that is sharded by itself begins or ends, within its block's."""

    position: int
    """Changes of the segment before it happens."""
    kernel: int
    """Kernels of the segment started by then."""
    turn: int
    """Gradients of the segment that are complete by then."""
    layer: str
    """Name within the block."""
    kind: str
    """before_forward, after_forward, before_backward or after_backward: what of `Plan` is called."""


@dataclass
class Segment:
    """What happens from one cut of the tape to the next."""

    phase: str
    """forward, backward, end (of a micro-batch) or optimizer."""
    micro_batch: int
    place: Place
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Bytes allocated (or, negative, released), and the storage's number."""
    kernels: list[Kernel] = field(default_factory=list)
    gradients: list[GradientEvent] = field(default_factory=list)
    collectives: list[CollectiveEvent] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)

    @property
    def events(self) -> list[GradientEvent | Visit]:
        """Complete gradients and visits in the order they happen."""
        found: list[GradientEvent | Visit] = []
        for number in range(len(self.gradients) + 1):
            found += [visit for visit in self.visits if visit.turn == number]
            found += self.gradients[number : number + 1]
        return found


@dataclass(frozen=True)
class Trace:
    """A tape as it was recorded, at one batch size."""

    segments: list[Segment]
    inputs_bytes: int
    """The micro-batches, which live as long as the run."""
    outputs_bytes: int = 0
    """Everything the model returns for one micro-batch; a stage, what it does not hand on as it got it."""
    logits_bytes: int = 0
    """Its logits alone."""


def record(key: TapeKey, batch_size: int, blocks: int | None = TRACED_BLOCKS) -> Trace:
    """Trace one step on fake tensors.

    Parameters
    ----------
    key: TapeKey
        What to trace.
    batch_size: int
        Sequences per micro-batch.
    blocks: int or None
        Blocks per list at most, None for all of them.
    """
    family = (None if blocks is None else key.family.shortened(blocks)) or key.family
    model = family.build()
    model.train()
    float8.convert(family, model, key.precision)
    if key.precision.scales_loss and key.autocast:
        keep_out_of_autocast(family.fp32_modules(model), torch.device("cpu"))
    checkpoint_blocks(family, model, key.activation_checkpointing)
    recording = Recording(on_cpu=key.device == "cpu")
    with (
        split_over(key.split, family, model),
        collector.at_rest(),
        FakeTensorMode(),
        operators_of(key.device),
        recording.recorder,
        recording.noting_random_states(),
    ):
        fill(model, family, key)
        names = local_names(family, model)
        recording.watch(family, model, names)
        if key.fp32_apart:
            recording.watch_layers(family, model)
        if key.widens_outputs:
            model.register_forward_hook(_widen)
        engine = Engine(
            module=model,
            stepper=_Stepper(recording),
            strategy=_Casting(key.autocast, key.autocast_caches),  # type: ignore[arg-type]
            precision=key.precision,
            device=torch.device("cpu"),
            synchronize_every_micro_batch=False,
            enter_phase=recording.enter_phase,
            loss=family.loss,
        )
        make = [lambda: family.batch(batch_size, key.sequence_length, torch.Generator())] * key.micro_batches
        micro_batches = recording.inputs(make)
        with _autocast_of_gpus(key):
            loss = engine.step(micro_batches)
        recording.recorder.close()
        del loss
    if key.compile:
        recording.fuse()
    for segment in recording.segments:
        order_releases(segment)
    recording.release_gradients()
    return Trace(recording.segments, recording.inputs_bytes, recording.outputs_bytes, recording.logits_bytes)


def _autocast_of_gpus(key: TapeKey) -> contextlib.AbstractContextManager[None]:
    """What torchao's layers look at."""
    if key.precision.in_float8 and key.autocast and key.device != "cpu":
        return float8.as_on_a_gpu(key.precision.compute_dtype)
    return contextlib.nullcontext()


def order_releases(segment: Segment) -> None:
    """Put what is released together into the order in which it was made.

    Autocast drops its copies of the weights in an order that differs from one trace to the next. Traces at two batch
    sizes are compared position by position.
    """
    breaks = {event.position for event in segment.events}
    ordered: list[tuple[int, int]] = []
    run: list[tuple[int, int]] = []
    for position, change in enumerate([*segment.changes, (1, 0)]):
        if change[0] > 0 or position in breaks:
            ordered += sorted(run, key=lambda each: each[1])
            run = []
        (run if change[0] < 0 else ordered).append(change)
    segment.changes = ordered[:-1]


def trace_to_plain(trace: Trace) -> dict[str, Any]:
    """As lists and numbers."""
    return dataclasses.asdict(trace)


def trace_from_plain(plain: dict[str, Any]) -> Trace:
    """The other way round."""
    segments = [
        Segment(
            phase=each["phase"],
            micro_batch=each["micro_batch"],
            place=None if each["place"] is None else (each["place"][0], each["place"][1]),
            changes=[(size, number) for size, number in each["changes"]],
            kernels=[
                (name, kind, form, tuple(dims), flops, moved)
                for name, kind, form, dims, flops, moved in each["kernels"]
            ],
            gradients=[GradientEvent(**event) for event in each["gradients"]],
            collectives=[CollectiveEvent(**event) for event in each["collectives"]],
            visits=[Visit(**event) for event in each["visits"]],
        )
        for each in plain["segments"]
    ]
    return Trace(segments, plain["inputs_bytes"], plain["outputs_bytes"], plain["logits_bytes"])


def local_names(family: Family, model: nn.Module) -> dict[int, tuple[Place, str]]:
    """Per parameter, by its identity: the block it belongs to and its name there (outside blocks: in the model)."""
    places: dict[int, tuple[Place, str]] = {}
    for index, blocks in enumerate(family.block_lists(model)):
        for position, block in enumerate(blocks):
            for name, parameter in block.named_parameters():
                places[id(parameter)] = ((index, position), name)
    for name, parameter in model.named_parameters():
        places.setdefault(id(parameter), (None, name))
    return places


class Recording:
    """Sorts what the recorder sees into segments."""

    def __init__(self, *, on_cpu: bool) -> None:
        self.segments: list[Segment] = []
        self._uses: list[list[Use]] = []
        self.inputs_bytes = self.outputs_bytes = self.logits_bytes = 0
        self._on_cpu = on_cpu
        self.recorder = Recorder(self._changed, self._launched, self._sent, on_cpu=on_cpu)
        self._micro_batch = -1
        self._counting_inputs = False
        self._completed: dict[tuple[int, str], int] = {}
        """Number of each complete gradient's storage, by the segment and the parameter."""

    def noting_random_states(self) -> contextlib.AbstractContextManager[None]:
        """Around what is recorded: on a CPU, what keeps the state of random numbers does so in the same memory."""
        return noting_random_states(self.recorder.track) if self._on_cpu else contextlib.nullcontext()

    def inputs(self, make: list[Callable[[], Batch]]) -> list[Batch]:
        """Make the micro-batches, counting what they take."""
        self._counting_inputs = True
        batches = [each() for each in make]
        self._counting_inputs = False
        return batches

    def enter_phase(self, phase: str) -> None:
        """Told by the engine."""
        if phase == "forward":
            self._micro_batch += 1
        self.cut(phase, LOSS if phase == "backward" else None)

    def watch(self, family: Family, model: nn.Module, names: dict[int, tuple[Place, str]]) -> None:
        """Cut where a block's forward and backward begin and a list of blocks ends; note complete gradients."""
        for index, blocks in enumerate(family.block_lists(model)):
            for position, block in enumerate(blocks):
                self.watch_block(block, (index, position), is_last=position == len(blocks) - 1)
        model.register_forward_hook(self._after_model)
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(self.completing(names[id(parameter)][1]))

    def watch_block(self, block: nn.Module, place: tuple[int, int], *, is_last: bool) -> None:
        """Cut where its forward and its backward begin, behind the last block of a list, and before the first."""

        def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.cut("forward", place)
            if place[1] == 0 and inputs[0].requires_grad and not inputs[0].is_leaf:  # no backward above what is frozen
                inputs[0].register_hook(lambda _gradient: self.cut("backward", None))

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if is_last:
                self.cut("forward", None)
            hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: self.cut("backward", place))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    def watch_layers(self, family: Family, model: nn.Module) -> None:
        """Note where the passes of layers that are sharded by themselves begin and end."""
        kept = set(family.fp32_modules(model))
        for block in (block for blocks in family.block_lists(model) for block in blocks):
            for name, layer in block.named_modules():
                if layer in kept:
                    self._watch_layer(layer, unwrapped(name))

    def _watch_layer(self, layer: nn.Module, name: str) -> None:
        def visit(kind: str) -> None:
            segment = self.segments[-1]
            place = len(segment.changes), len(segment.kernels), len(segment.gradients)
            segment.visits.append(Visit(*place, name, kind))

        def before(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            visit("before_forward")
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda _gradient: visit("after_backward"))

        def after(_layer: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            visit("after_forward")
            if output.requires_grad:
                output.register_hook(lambda _gradient: visit("before_backward"))

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    def _after_model(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.cut("forward", LOSS)
        self.outputs_bytes = sum(each.nbytes for each in output.values() if isinstance(each, torch.Tensor))
        self.logits_bytes = output["logits"].nbytes
        output["logits"].register_hook(lambda _gradient: self.cut("backward", None))

    def completing(self, name: str) -> Callable[[torch.Tensor], None]:
        """A hook that notes a complete gradient, which then leaves the tape."""

        def complete(parameter: torch.Tensor) -> None:
            segment = self.segments[-1]
            segment.gradients.append(GradientEvent(len(segment.changes), len(segment.kernels), name))
            if parameter.grad is not None:
                self._completed[id(segment), name] = self.recorder.number_of(parameter.grad)
            parameter.grad = None

        return complete

    def cut(self, phase: str, place: Place) -> None:
        """Begin a new segment."""
        self.segments.append(Segment(phase, self._micro_batch, place))
        self._uses.append([])

    def _changed(self, size: int, number: int) -> None:
        if self._counting_inputs:
            self.inputs_bytes += size
        elif self.segments:
            self.segments[-1].changes.append((size, number))

    def _launched(self, kernel: Kernel, reads: Uses, writes: Uses) -> None:
        if self.segments and not self._counting_inputs:
            self.segments[-1].kernels.append(kernel)
            self._uses[-1].append(Use(reads, writes))

    def _sent(self, kind: str, size: int) -> None:
        if self.segments and not self._counting_inputs:
            segment = self.segments[-1]
            segment.collectives.append(CollectiveEvent(len(segment.kernels), kind, size))

    def release_gradients(self) -> None:
        """Let every gradient leave the tape right behind the event that completes it.

        Autograd lets go of it a moment later, when the next block's backward may have begun. By then it is the
        strategy's, which would count it a second time.
        """
        numbers = set(self._completed.values())
        late = {change for each in self.segments for change in each.changes if change[0] < 0 and change[1] in numbers}
        releases = {number: [(size, number)] for size, number in late}
        for segment in self.segments:
            changes: list[tuple[int, int]] = []
            moved: list[GradientEvent | Visit] = []
            start = 0
            for event in segment.events:
                changes += [change for change in segment.changes[start : event.position] if change not in late]
                start = event.position
                moved.append(dataclasses.replace(event, position=len(changes)))
                if isinstance(event, GradientEvent):
                    changes += releases.get(self._completed.get((id(segment), event.parameter), 0), [])
            segment.changes = changes + [change for change in segment.changes[start:] if change not in late]
            segment.gradients = [event for event in moved if isinstance(event, GradientEvent)]
            segment.visits = [event for event in moved if isinstance(event, Visit)]

    def fuse(self) -> None:
        """Put the kernels of every block together as a compiler does."""
        everything = (use for uses in self._uses for use in uses)
        last_read = {number: index for index, use in enumerate(everything) for number, _ in use.reads}
        first = 0
        for segment, uses in zip(self.segments, self._uses, strict=True):
            start, first = first, first + len(uses)
            if segment.place is None or segment.place == LOSS:
                continue
            exchanges = {event.kernel for event in segment.collectives}
            segment.kernels, became = fused(segment.kernels, uses, last_read, start, exchanges)
            ends = [*became, len(segment.kernels)]
            segment.gradients = [dataclasses.replace(event, kernel=ends[event.kernel]) for event in segment.gradients]
            segment.visits = [dataclasses.replace(event, kernel=ends[event.kernel]) for event in segment.visits]
            segment.collectives = [
                dataclasses.replace(event, kernel=ends[event.kernel]) for event in segment.collectives
            ]


def fill(model: nn.Module, family: Family, key: TapeKey) -> None:
    """Give the model, which is on meta, fake buffers, and fake parameters of the format it computes with."""
    kept = family.fp32_modules(model) if key.precision.scales_loss else ()
    keep_fp32 = {inner for module in kept for inner in module.modules()}
    cast = key.precision.parameter_dtype if key.autocast else key.precision.compute_dtype
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        dtype = torch.float32 if module in keep_fp32 else cast
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                fake = torch.empty(own_shape(parameter), dtype=dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(as_part_of(parameter, fake), requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
        fill_buffers(module, family, torch.device("cpu"))
        family.store(module)


def _widen(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """What some frameworks do to a model's outputs."""
    outputs["logits"] = outputs["logits"].float()
    return outputs


@dataclass(frozen=True)
class _Casting:
    """Stands for a strategy in the engine: all a strategy does apart from wrapping and communicating."""

    autocast: bool
    autocast_caches: bool

    def uses_autocast(self, _precision: Precision) -> bool:
        """As the strategy does."""
        return self.autocast

    @contextlib.contextmanager
    def accumulate(self, _module: nn.Module, synchronize: bool) -> Iterator[None]:
        """Gradients leave the tape as soon as they are complete."""
        yield


class _Stepper(Stepper):
    """Cuts where the backward pass is over: what strategies do last of all they do before logits and loss are gone."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(_NoOptimizer(), torch.amp.GradScaler(enabled=False), keep_gradients=False)  # type: ignore[arg-type]
        self._recording = recording

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of a micro-batch."""
        super().backward(loss)
        self._recording.cut(END, None)


class _NoOptimizer:
    """Stands for the optimizer, which works on what a strategy stores."""

    def step(self) -> None:
        """Nothing to update."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to free."""
