"""What a strategy stores and sends, and when: the vocabulary in which each strategy's file states its plan.

A plan is told of every event of a step, in the order the processor meets them, and answers by acting on a `Device`:
memory is held and released, collectives are sent and waited for. Whoever simulates a step implements `Device` and
plays the model's own computation in between; it knows no strategy by name.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.precision import Precision

PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, REDUCED = "parameters", "gradients", "optimizer", "gathered", "reduced"
"""What memory is held for."""

GATHER, REDUCE, REPLICATE = "gather", "reduce", "replicate"
"""Streams that communicate beside the one that computes."""

WORLD, SHARDS, REPLICAS, TENSOR = "world", "shards", "replicas", "tensor"
"""Groups of ranks: all of them; those that share one copy of the model; those that hold the same shard; those that
share every layer, of each of which the three others then have one rank."""


STAY, ADDED, TOLD = "stay", "added", "told"
"""What becomes of gradients as they are completed: they stay, all of a unit's held under `gradients_of` it; they are
added to what is held there already; or the plan is told of each."""


def gradients_of(unit: Unit) -> str:
    """The name under which a unit's gradients are held."""
    return f"gradients {unit.index}"


@dataclass(frozen=True)
class Parameter:
    """One parameter as the model has it."""

    name: str
    """Within its block; for the root, within the model."""
    shape: tuple[int, ...]
    keeps_fp32: bool = False
    """Computed in fp32 even where the rest is in 16 bits."""
    is_trained: bool = True
    """Has a gradient and optimizer state."""
    fixed_bytes: int | None = None
    """What it takes in any precision: quantised, with its scales."""

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def first_shard(self, ranks: int) -> int:
        """Elements of the first of so many shards along the first dimension, than which the others are never larger."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // ranks) * (self.numel // rows)

    def padded(self, ranks: int) -> int:
        """Elements of all shards, the last ones padded, where they are not all of one size; else 0."""
        whole = self.first_shard(ranks) * ranks
        return whole if whole != self.numel else 0


@dataclass(frozen=True)
class Unit:
    """Parameters that a sharding strategy gathers as one: a group of blocks, or the root with what is left."""

    index: int
    """In the order in which forward passes end; the root, which is needed first and last, has -1."""
    name: str
    parameters: tuple[Parameter, ...]
    within_next: bool = False
    """It is a layer within the next unit that is none."""

    @functools.cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """Those that have gradients."""
        return tuple(parameter for parameter in self.parameters if parameter.is_trained)

    @property
    def keeps_fp32(self) -> bool:
        """Whether it is computed in fp32 even where the rest is in 16 bits."""
        return all(parameter.keeps_fp32 for parameter in self.parameters) and bool(self.parameters)

    @property
    def is_root(self) -> bool:
        """Whether this is what lies outside the blocks."""
        return self.index < 0


@dataclass(frozen=True)
class Setting:
    """What a plan must know of the run."""

    units: tuple[Unit, ...]
    """The root first, then the others in the order in which their forward passes end."""
    precision: Precision
    world_size: int
    states_per_parameter: int
    """Tensors of a parameter's size that the optimizer keeps."""
    micro_batches: int
    keep_gradients: bool = False
    """Gradients are filled with zeros after a step, not freed."""
    outputs_bytes: float = 0.0
    """Of everything the model returns for a micro-batch."""
    logits_bytes: float = 0.0
    """Of its logits alone."""
    casts: bool = True
    """Parameters are cast to the format that is computed in; else autocast does what is mixed."""
    on_cpu: bool = False
    """The device is a CPU, where some of torch's operators need memory that a GPU's kernels do not."""
    order: tuple[tuple[int, int], ...] = ()
    """All parameters in the order of the model, which is the optimizer's: each as the position of its unit in `units`,
    and its own there. Empty: as the units have them."""

    @functools.cached_property
    def in_model_order(self) -> tuple[tuple[int, int], ...]:
        """As `order`, never empty."""
        units = enumerate(self.units)
        return self.order or tuple((index, own) for index, unit in units for own in range(len(unit.parameters)))

    @functools.cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """All that have gradients, in the order of the model."""
        ordered = (self.units[unit].parameters[own] for unit, own in self.in_model_order)
        return tuple(parameter for parameter in ordered if parameter.is_trained)

    @property
    def parameter_bytes(self) -> int:
        """Of one stored element."""
        return self.precision.parameter_dtype.itemsize

    def stored_bytes(self, parameter: Parameter) -> int:
        """Of a whole parameter."""
        fixed = parameter.fixed_bytes
        return parameter.numel * self.parameter_bytes if fixed is None else fixed

    @property
    def reduce_bytes(self) -> int:
        """Of one element of a gradient that is reduced."""
        return self.precision.reduce_dtype.itemsize

    @property
    def cast_bytes(self) -> int:
        """Of one element of a parameter as the strategy hands it to the model, and of its gradient."""
        return self.precision.compute_dtype.itemsize if self.casts else self.parameter_bytes

    def compute_bytes(self, parameter: Parameter) -> int:
        """The same of a parameter that may stay in fp32."""
        return 4 if parameter.keeps_fp32 else self.cast_bytes


class Device(Protocol):
    """One rank's device, as a plan acts on it."""

    def hold(self, name: str, size: float, part: str) -> None:
        """Allocate `size` bytes under a name, for one of PARAMETERS ... REDUCED. What is held under it is freed."""

    def grow(self, name: str, size: float, part: str) -> None:
        """Hold more under a name, or less: without a look at the peak."""

    def release(self, name: str, *, after: str | None = None) -> None:
        """Free what is held under a name, if it is. On a device with streams the memory can be used again only when
        the work already given to stream `after` (None: the one that computes) is done."""

    def copy(self, name: str, size: float) -> None:
        """Move `size` bytes (read and written together) on the device, before what is computed next."""

    def send(self, name: str, kind: str, size: float, group: str, stream: str, *, after: str | None = None) -> None:
        """Start a collective of `size` bytes (the whole, gathered) on a stream, when what was given to it, and to
        stream `after` (``compute`` or another), is done."""

    def transfer(self, name: str, size: float, stream: str, *, after: str | None = None) -> None:
        """Start copying `size` bytes between the device and its machine's memory, on a stream as in `send`."""

    def wait(self, name: str) -> None:
        """Let computation go on only when a collective, or a transfer, is done."""

    def mark(self, name: str) -> None:
        """Give this point of the computation a name."""

    def follow(self, stream: str, name: str) -> None:
        """Let what is sent on a stream from now on start only when the computation has come to a mark."""

    def note_release(self, *, after: str | None = None) -> None:
        """Remember this point of the work given to stream `after` (None: the one that computes) for `throttle`."""

    def throttle(self, most: int) -> None:
        """If `most` points noted by `note_release` have not been waited for, stop the processor until the device has
        come to the oldest of them."""

    def hooks(self, count: float = 1.0) -> None:
        """The processor is busy with a unit's hooks."""


class Plan(ABC):
    """One rank's part in a step. Called in the order of the step."""

    updates_on_host = False
    """Whether the processors of the machine carry out the optimizer's step."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @property
    def host_bytes(self) -> float:
        """What this rank keeps in the memory of the machine around its device."""
        return 0.0

    @property
    def carried(self) -> float:
        """Bytes that come to the device for the optimizer's step, and those that go back, one after the other."""
        return 0.0

    @property
    def copied_on_host(self) -> float:
        """Bytes read and written in the machine's memory once a step, beside what the optimizer does there."""
        return 0.0

    @abstractmethod
    def begin(self, device: Device) -> None:
        """What is held from one step to the next: parameters, optimizer state, buckets."""

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """A micro-batch starts; `synchronize` says whether its gradients are reduced."""

    def before_forward(self, device: Device, unit: Unit) -> None:
        """A unit is about to run forward."""

    def after_forward(self, device: Device, unit: Unit) -> None:
        """A unit has run forward."""

    def before_backward(self, device: Device, unit: Unit) -> None:
        """A unit is about to run backward."""

    @abstractmethod
    def gradient_bytes(self, parameter: Parameter) -> int:
        """Size of a parameter's gradient as autograd leaves it."""

    def gradients(self, unit: Unit) -> str:
        """What becomes of a unit's gradients as they are completed: STAY, ADDED or TOLD."""
        return TOLD

    def gradient(self, device: Device, unit: Unit, parameter: Parameter) -> None:
        """Where they are TOLD: one is complete. The tape releases it as it goes on; what is to stay must be held."""

    def after_backward(self, device: Device, unit: Unit) -> None:
        """A unit has run backward, all its gradients are complete."""

    def after_step_backward(self, device: Device) -> None:
        """The micro-batch's backward is over, the root's included."""

    @property
    @abstractmethod
    def updated(self) -> Sequence[int]:
        """Elements of each tensor that this rank's optimizer updates, in its order."""

    @abstractmethod
    def after_optimizer(self, device: Device) -> None:
        """Gradients are no longer needed."""


class WholePlan(Plan):
    """Whole parameters, gradients and optimizer state on every rank: what one process does."""

    _micro_batches = 0

    def begin(self, device: Device) -> None:
        """Everything is there all the time but the gradients."""
        parameters = [parameter for unit in self.setting.units for parameter in unit.parameters]
        device.hold("parameters", sum(map(self.setting.stored_bytes, parameters)), PARAMETERS)
        hold_optimizer(device, self.setting, self.updated)
        if self.setting.keep_gradients:
            for unit in self.setting.units:
                device.hold(gradients_of(unit), sum(map(self.gradient_bytes, unit.trained)), GRADIENTS)

    @property
    def numel(self) -> int:
        """Elements of all gradients."""
        return sum(parameter.numel for unit in self.setting.units for parameter in unit.trained)

    @property
    def updated(self) -> Sequence[int]:
        """All parameters that are trained."""
        return [parameter.numel for parameter in self.setting.trained]

    def gradient_bytes(self, parameter: Parameter) -> int:
        """In the format of the parameter."""
        return parameter.numel * self.setting.parameter_bytes

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """Count them."""
        self._micro_batches += 1

    def gradients(self, unit: Unit) -> str:
        """They stay until the optimizer has used them; later micro-batches add to them."""
        return STAY if self._micro_batches == 1 and not self.setting.keep_gradients else ADDED

    def after_optimizer(self, device: Device) -> None:
        """Set to None, or to zero."""
        self._micro_batches = 0
        if self.setting.keep_gradients:
            device.copy("zeros", self.numel * self.setting.parameter_bytes)
            return
        for unit in self.setting.units:
            device.release(gradients_of(unit))


def optimizer_bytes(setting: Setting, updated: Sequence[int]) -> float:
    """Of the optimizer's states of tensors with these numbers of elements."""
    states = setting.states_per_parameter
    counters = STEP_BYTES * len(updated) if states > 1 else 0
    return states * sum(updated) * setting.parameter_bytes + counters


STEP_BYTES = 4
"""AdamW counts the steps of each parameter in an fp32 tensor of its own."""


def hold_optimizer(device: Device, setting: Setting, updated: Sequence[int]) -> None:
    """Hold the optimizer's states of tensors with these numbers of elements."""
    device.hold("optimizer", optimizer_bytes(setting, updated), OPTIMIZER)


def hold_copied_in(device: Device, unit: Unit, ranks: int, itemsize: int, into: int) -> None:
    """Hold for a moment what a CPU needs to copy gradients into the buffer that is reduced (``_chunk_cat`` in
    aten/src/ATen/native/TensorShape.cpp): copies, of all of a unit's at once, of those whose rows the ranks do not
    divide; and where the buffer has another format a copy of each in turn.

    Parameters
    ----------
    itemsize, into: int
        Bytes of an element of a gradient, and of the buffer.
    """
    padded = sum(parameter.padded(ranks) for parameter in unit.trained)
    in_turn = max((parameter.padded(ranks) or parameter.numel for parameter in unit.trained), default=0)
    device.hold("copied in", (padded + (in_turn if itemsize != into else 0)) * itemsize, REDUCED)
    device.release("copied in")
