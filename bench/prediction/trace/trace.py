"""A trace of one training step: what the model itself computes and allocates, whatever strategy wraps it.

It is cut where blocks begin, so that a strategy's actions can be put in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.config.run_id import to_plain_value
from bench.core.precision import Precision
from bench.models import Family
from bench.models.checkpointing import find_block_period
from bench.prediction.trace.kernels import KernelRecord
from bench.strategies.plan_inputs import ParameterSpec
from bench.strategies.step_plan import TENSOR_GROUP

if TYPE_CHECKING:
    from bench.strategies.tensor_parallel.split import TensorParallelSplit

BlockPlace = tuple[int, int] | None
"""Block list and position in it; None for what lies outside the blocks."""

LocatedParameter = tuple[BlockPlace, ParameterSpec]
"""A parameter and where it is."""

LOSS_PLACE = (-1, 0)
"""The place of what the step does with the model's output, outside the model."""

END_PHASE = "end"
"""The phase between a backward pass and what comes next, in which logits and loss are let go."""

SEND = "send"
"""What an all-to-all is in which each rank sends everything to one other rank."""

TO_HOST, TO_DEVICE = "to-host", "to-device"
"""What is noted as a collective, since computation waits for it as well: copies of activations that are offloaded."""


@dataclass(frozen=True)
class TraceKey:
    """Everything a trace depends on but the batch size."""

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
    """Blocks are compiled (`bench.prediction.trace.compiled_blocks`)."""
    widens_outputs: bool = False
    """The model's outputs are converted to fp32."""
    split: TensorParallelSplit | None = None
    """Over how many ranks every layer is split."""
    autocast_caches: bool = True
    """Autocast keeps what it casts of parameters until the forward pass is over."""
    shards_fp32_separately: bool = False
    """Layers that stay in fp32 in fp16 runs are sharded by themselves, within their blocks."""
    shards_trained_separately: bool = False
    """So are trained layers of blocks that are frozen otherwise."""
    shards_experts_separately: bool = False
    """So are the experts of a layer."""
    loss_chunks: int | None = None
    """The loss is computed in so many chunks; None for all of it at once."""
    compiles_loss: bool = False
    """The loss is compiled, too."""
    activation_offload: bool = False
    """Blocks offload what they keep for backward."""
    num_ranks: int = 1
    """Among which the model itself exchanges something; 1 for a model that does not."""

    @property
    def has_compiled_parts(self) -> bool:
        """As `bench.config.run_config.RunConfig` has it."""
        return self.compile or self.compiles_loss

    @property
    def block_period(self) -> int:
        """Blocks after which they, and what checkpointing does to them, repeat."""
        return find_block_period(self.family, self.activation_checkpointing)

    @property
    def num_first_blocks(self) -> int:
        """Blocks of every list that come before those that repeat."""
        return self.family.num_first_blocks


@dataclass(frozen=True)
class CollectiveEvent:
    """Ranks that share a layer exchange something, and computation waits for it."""

    kernel: int
    """Kernels of the segment started by then."""
    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all or `SEND`; or `TO_HOST`, `TO_DEVICE`."""
    size: int
    """Bytes of the whole; of an all-to-all, what a rank has for all ranks."""
    group: str = TENSOR_GROUP
    """Which ranks: one of a plan's groups."""
    waited_kernel: int | None = None
    """Kernels of the segment started when it is waited for, as far as it goes on beside them; None: at once."""


@dataclass(frozen=True)
class GradientEvent:
    """A parameter's gradient is complete and leaves the trace: the strategy decides what becomes of it."""

    position: int
    """Changes of the segment before it happens."""
    kernel: int
    """Kernels of the segment started by then."""
    parameter: str
    """Name within the block, or in the model for what lies outside."""


@dataclass(frozen=True)
class LayerPassEvent:
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
    """before_forward, after_forward, before_backward or after_backward: what of `StepPlan` is called."""


@dataclass
class TraceSegment:
    """What happens from one cut of the trace to the next."""

    phase: str
    """forward, backward, end (of a micro-batch) or optimizer."""
    micro_batch: int
    place: BlockPlace
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Bytes allocated (or, negative, released), and the storage's number."""
    kernels: list[KernelRecord] = field(default_factory=list)
    gradients: list[GradientEvent] = field(default_factory=list)
    collectives: list[CollectiveEvent] = field(default_factory=list)
    visits: list[LayerPassEvent] = field(default_factory=list)

    @property
    def events(self) -> list[GradientEvent | LayerPassEvent]:
        """Complete gradients and visits in the order they happen."""
        ordered_events: list[GradientEvent | LayerPassEvent] = []
        for num_gradients in range(len(self.gradients) + 1):
            ordered_events += [visit for visit in self.visits if visit.turn == num_gradients]
            ordered_events += self.gradients[num_gradients : num_gradients + 1]
        return ordered_events


@dataclass(frozen=True)
class Trace:
    """A trace as it was recorded, at one batch size."""

    segments: list[TraceSegment]
    inputs_bytes: int
    """The micro-batches, which live as long as the run."""
    outputs_bytes: int = 0
    """Everything the model returns for one micro-batch; a stage, what it does not hand on as it got it."""
    logits_bytes: int = 0
    """Its logits alone."""
    parameters: tuple[LocatedParameter, ...] = ()
    """Of a stage, as a rank has them, in the order of its module."""


def sort_simultaneous_frees(segment: TraceSegment) -> None:
    """Put what is released together into the order in which it was made.

    Autocast drops its copies of the weights in an order that differs from one trace to the next. Traces at two batch
    sizes are compared position by position.
    """
    event_positions = {event.position for event in segment.events}
    sorted_changes: list[tuple[int, int]] = []
    frees: list[tuple[int, int]] = []
    for position, change in enumerate([*segment.changes, (1, 0)]):
        if change[0] > 0 or position in event_positions:
            sorted_changes += sorted(frees, key=lambda change: change[1])
            frees = []
        (frees if change[0] < 0 else sorted_changes).append(change)
    segment.changes = sorted_changes[:-1]


def trace_to_plain(trace: Trace) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain_value(trace)
    return plain


def trace_from_plain(plain: dict[str, Any]) -> Trace:
    segments = [
        TraceSegment(
            phase=segment["phase"],
            micro_batch=segment["micro_batch"],
            place=None if segment["place"] is None else (segment["place"][0], segment["place"][1]),
            changes=[(size, number) for size, number in segment["changes"]],
            kernels=[
                KernelRecord(name, kind, form, tuple(dims), *numbers)
                for name, kind, form, dims, *numbers in segment["kernels"]
            ],
            gradients=[GradientEvent(**event) for event in segment["gradients"]],
            collectives=[CollectiveEvent(**event) for event in segment["collectives"]],
            visits=[LayerPassEvent(**event) for event in segment["visits"]],
        )
        for segment in plain["segments"]
    ]
    parameters = tuple(
        (None if place is None else (place[0], place[1]), ParameterSpec(**{**spec, "shape": tuple(spec["shape"])}))
        for place, spec in plain["parameters"]
    )
    return Trace(segments, plain["inputs_bytes"], plain["outputs_bytes"], plain["logits_bytes"], parameters)
