"""What one rank of a pipeline holds from one micro-batch to the next, alone, under DDP and under FSDP.

Read in torch 2.13 (``torch/distributed/pipelining/stage.py``): under DDP gradients accumulate as tensors of their own,
and are copied into the buckets in the last backward; under FSDP whole parameters stay from the first use of a stage
until its last backward is over, and so do whole gradients, which are then reduced unit by unit, what lies outside the
blocks first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from bench.strategies.plan import (
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    REDUCED,
    Device,
    Parameter,
    Setting,
    Unit,
    hold_copied_in,
    hold_optimizer,
)


@dataclass(frozen=True)
class StageUnits:
    """One stage of a rank: its root first, then its blocks."""

    index: int
    units: tuple[Unit, ...]
    parameters: tuple[Parameter, ...]
    """All of them, in the order of the stage's module."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(parameter.numel for parameter in self.parameters)


def tied(names: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Parameters that several stages have, by their names in the whole model, and those stages."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(names):
        for name in stage:
            found.setdefault(name, []).append(index)
    return {name: stages for name, stages in found.items() if len(stages) > 1}


class RankPlan(ABC):
    """What the rank holds for its stages. Called in the order of a step."""

    def __init__(self, stages: Sequence[StageUnits], setting: Setting) -> None:
        self.stages = stages
        self.setting = setting
        self.keeps = setting.keep_gradients
        self.itemsize = setting.parameter_bytes

    @property
    @abstractmethod
    def updated(self) -> list[int]:
        """Elements of each tensor that the optimizer updates."""

    def begin(self, device: Device) -> None:
        """Parameters and optimizer state."""
        elements = sum(self.updated)
        device.hold("parameters", elements * self.itemsize, PARAMETERS)
        hold_optimizer(device, self.setting, self.updated)

    gathers = False
    """Whether units are gathered, one by one, as the first micro-batch comes to them."""

    def begin_step(self, device: Device, *, ahead: bool) -> None:
        """A step begins; `ahead` says that the schedule gathers stages before it comes to them."""

    def before_unit(self, device: Device, stage: StageUnits, unit: Unit) -> None:
        """The first micro-batch of a step comes to a unit."""

    def after_first_forward(self, device: Device, stage: StageUnits) -> None:
        """The first micro-batch has left a stage."""

    def stays(self, parameter: Parameter) -> float:
        """Bytes of a gradient that stay when its first micro-batch is over, beyond what was there before."""
        return 0.0 if self.keeps else float(parameter.numel * self.itemsize)

    def tells(self, *, last: bool) -> bool:
        """Whether each gradient of a backward is told of, by `gradient`, as it is complete."""
        return False

    def gradient(self, device: Device, stage: StageUnits, unit: Unit, parameter: Parameter, *, first: bool) -> None:
        """Where they are told of: one is complete."""

    def added_bytes(self, unit: Unit) -> float:
        """What a CPU needs for a moment to add a unit's gradients, one by one, to those of another format."""
        return 0.0

    def after_unit(self, device: Device, stage: StageUnits, unit: Unit) -> None:
        """A block of a stage has run backward."""

    def after_last_backward(self, device: Device, stage: StageUnits) -> None:
        """All micro-batches of a stage have run backward."""

    def after_optimizer(self, device: Device) -> None:
        """Gradients are set to None, or zero."""
        if not self.keeps:
            for stage in self.stages:
                device.release(gradients_of_stage(stage))


def gradients_of_stage(stage: StageUnits) -> str:
    """The name under which a stage's gradients are held."""
    return f"gradients {stage.index}"


class AlonePlan(RankPlan):
    """One copy of the model."""

    @property
    def updated(self) -> list[int]:
        """All parameters of the rank's stages."""
        return [parameter.numel for stage in self.stages for parameter in stage.parameters]

    def begin(self, device: Device) -> None:
        """Gradients too, if they are kept."""
        super().begin(device)
        if self.keeps:
            for stage in self.stages:
                device.hold(gradients_of_stage(stage), stage.numel * self.itemsize, GRADIENTS)


class ReplicatedPlan(AlonePlan):
    """DDP around each stage, whose gradients are views of its buckets when a step is over."""

    def begin(self, device: Device) -> None:
        """Buckets, in which kept gradients are."""
        super().begin(device)
        for stage in self.stages:
            device.release(gradients_of_stage(stage))
            device.hold(f"buckets {stage.index}", stage.numel * self.itemsize, GRADIENTS)

    def tells(self, *, last: bool) -> bool:
        """In the last backward."""
        return last

    def gradient(self, device: Device, stage: StageUnits, unit: Unit, parameter: Parameter, *, first: bool) -> None:
        """Into its bucket; what was accumulated is freed."""
        if self.keeps:
            return
        size, own = parameter.numel * self.itemsize, gradients_of_stage(stage)
        if first:
            device.hold("copied into bucket", size, GRADIENTS)
            device.release("copied into bucket")
        else:
            device.grow(own, -size, GRADIENTS)


GATHERED_AHEAD = 3
"""Stages that torch's interleaved schedules have gathered at a time (``_add_unshard_reshard``)."""


class ShardedStagePlan(RankPlan):
    """FSDP2 around each stage and each of its blocks, over so many copies."""

    def __init__(self, stages: Sequence[StageUnits], setting: Setting, copies: int) -> None:
        super().__init__(stages, setting)
        self._copies = copies
        self._computed = setting.precision.compute_dtype.itemsize
        self._reduced = setting.reduce_bytes
        self._accumulated: set[tuple[int, int]] = set()

    @property
    def updated(self) -> list[int]:
        """The first copy's shards, which are never smaller than the others'."""
        return [parameter.first_shard(self._copies) for stage in self.stages for parameter in stage.parameters]

    def _whole(self, unit: Unit) -> int:
        return sum(parameter.first_shard(self._copies) for parameter in unit.parameters) * self._copies

    def begin(self, device: Device) -> None:
        """Shards of gradients too, if they are kept."""
        super().begin(device)
        if self.keeps:
            device.hold("gradient shards", sum(self.updated) * self.itemsize, GRADIENTS)

    gathers = True

    def begin_step(self, device: Device, *, ahead: bool) -> None:
        """Stages that are gathered ahead arrive in buffers."""
        for stage in self.stages[: GATHERED_AHEAD if ahead else 0]:
            for unit in stage.units:
                device.hold(f"buffer {stage.index} {unit.index}", self._whole(unit) * self._computed, GATHERED)

    def before_unit(self, device: Device, stage: StageUnits, unit: Unit) -> None:
        """Copy it out of the buffer, which lives until the next unit is copied out."""
        size = self._whole(unit) * self._computed
        name = f"buffer {stage.index} {unit.index}"
        device.release(name)
        device.hold(f"buffer {stage.index}", size, GATHERED)
        device.hold(f"whole {stage.index} {unit.index}", size, GATHERED)

    def after_first_forward(self, device: Device, stage: StageUnits) -> None:
        """The last buffer goes."""
        device.release(f"buffer {stage.index}")

    def added_bytes(self, unit: Unit) -> float:
        """The largest of them, converted."""
        return max(parameter.numel for parameter in unit.parameters) * self._reduced if self._converts else 0.0

    def stays(self, parameter: Parameter) -> float:
        """Whole, in the format it is computed in, unless it is converted as soon as its unit is over."""
        return 0.0 if self._converts else float(parameter.numel * self._computed)

    @property
    def _converts(self) -> bool:
        return self._reduced != self._computed

    def tells(self, *, last: bool) -> bool:
        """Where gradients are converted unit by unit."""
        return self._converts

    def gradient(self, device: Device, stage: StageUnits, unit: Unit, parameter: Parameter, *, first: bool) -> None:
        """It waits for the others of its unit."""
        device.grow(f"computed {stage.index} {unit.index}", parameter.numel * self._computed, GRADIENTS)

    def after_unit(self, device: Device, stage: StageUnits, unit: Unit) -> None:
        """Gradients are converted to the format they are reduced in, or added to those that are there in it."""
        if not self._converts:
            return
        name = f"accumulated {stage.index} {unit.index}"
        if (stage.index, unit.index) not in self._accumulated:
            self._accumulated.add((stage.index, unit.index))
            device.hold(name, sum(p.numel for p in unit.parameters) * self._reduced, GRADIENTS)
        device.release(f"computed {stage.index} {unit.index}")

    def after_last_backward(self, device: Device, stage: StageUnits) -> None:
        """Reduce unit by unit: whole parameters go, gradients are copied into a buffer, a shard comes out."""
        own = gradients_of_stage(stage)
        for unit in stage.units:
            elements = sum(parameter.numel for parameter in unit.parameters)
            device.release(f"whole {stage.index} {unit.index}")
            device.release("reduce input")
            device.hold("reduce input", self._whole(unit) * self._reduced, REDUCED)
            if self.setting.on_cpu:
                hold_copied_in(device, unit, self._copies, self._reduced, self._reduced)
            if self._converts:
                device.release(f"accumulated {stage.index} {unit.index}")
            else:
                device.grow(own, -elements * self._computed, GRADIENTS)
            shard = f"gradient shard {stage.index} {unit.index}"
            local = self._whole(unit) // self._copies
            device.hold(shard, local * self._reduced, GRADIENTS)
            if self._reduced != self.itemsize:
                device.hold("converted shard", local * self.itemsize, GRADIENTS)
                device.release(shard)
                device.hold(shard, local * self.itemsize, GRADIENTS)
                device.release("converted shard")
        device.release("reduce input")
        device.release(own)
        self._accumulated.clear()

    def after_optimizer(self, device: Device) -> None:
        """Shards of gradients are set to None."""
        for stage in self.stages:
            for unit in stage.units:
                device.release(f"gradient shard {stage.index} {unit.index}")
