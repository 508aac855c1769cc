"""What one rank of a pipeline holds from one micro-batch to the next, alone, under DDP and under FSDP.

Read in torch 2.13 (``torch/distributed/pipelining/stage.py``): under DDP gradients accumulate as tensors of their own,
and are copied into the buckets in the last backward; under FSDP whole parameters stay from the first use of a stage
until its last backward is over, and so do whole gradients, which are then reduced unit by unit, what lies outside the
blocks first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from bench.core.units import MIB
from bench.optimizers import UpdatedTensor
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    DATA_GROUP,
    EXPERT_DATA_GROUP,
    EXPERT_SHARD_GROUP,
    GRADIENT_MEMORY,
    PARAMETER_MEMORY,
    REDUCTION_MEMORY,
    REPLICA_GROUP,
    SHARD_GROUP,
    WORLD_GROUP,
    PlanDevice,
    RankPlan,
    allocate_copy_in_briefly,
    allocate_optimizer_state,
)


@dataclass(frozen=True)
class StageUnits:
    """One stage of a rank: its root first, then its blocks."""

    index: int
    units: tuple[ShardingUnit, ...]
    parameters: tuple[ParameterSpec, ...]
    """All of them, in the order of the stage's module."""

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @functools.cached_property
    def trained_parameters(self) -> tuple[ParameterSpec, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.is_trained)

    @property
    def trained_numel(self) -> int:
        return sum(parameter.numel for parameter in self.trained_parameters)


def find_tied_parameters(names: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Parameters that several stages have, by their names in the whole model, and those stages."""
    stages_by_name: dict[str, list[int]] = {}
    for index, stage_names in enumerate(names):
        for name in stage_names:
            stages_by_name.setdefault(name, []).append(index)
    return {name: stages for name, stages in stages_by_name.items() if len(stages) > 1}


@dataclass(frozen=True)
class PlannedCollective:
    """What the ranks of a group exchange for a stage."""

    kind: str
    size: float
    """Bytes of the whole."""
    group: str
    count: float = 1.0
    """How often, one after the other."""
    in_backward: bool = False
    """While the last backward of the stage goes on."""


class StagePlan(RankPlan):
    """One rank's part in a step of a pipeline, stage by stage. Called in the order of the step."""

    def __init__(self, stages: Sequence[StageUnits], inputs: PlanInputs) -> None:
        super().__init__(inputs)
        self.stages = stages
        self.keeps_gradients = inputs.keep_gradients
        self.parameter_itemsize = inputs.parameter_itemsize

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        device.allocate("parameters", self.parameter_numel * self.parameter_itemsize, PARAMETER_MEMORY)
        allocate_optimizer_state(device, self.inputs, self.updated_tensors)

    @property
    def parameter_numel(self) -> int:
        """Elements of parameters that this rank keeps."""
        return sum(stage.numel for stage in self.stages)

    @property
    def norm_groups(self) -> Sequence[str]:
        """All ranks, which divide what several of them have by their number."""
        return (WORLD_GROUP,)

    num_shards = 1
    """Ranks that each parameter is sharded over."""

    def list_gathers(self, stage: StageUnits) -> Sequence[PlannedCollective]:
        """Of a stage's parameters, in the order in which its first micro-batch comes to them."""
        return ()

    def list_reductions(self, stage: StageUnits) -> Sequence[PlannedCollective]:
        """Of a stage's gradients."""
        return ()

    def list_update_broadcasts(self) -> Sequence[PlannedCollective]:
        """Of what the rank's copies have updated each for all, when the optimizer's step is over."""
        return ()

    gathers_units = False
    """Whether units are gathered, one by one, as the first micro-batch comes to them."""

    def begin_step(self, device: PlanDevice, *, gathers_ahead: bool) -> None:
        """A step begins; `gathers_ahead` says that the schedule gathers stages before it comes to them."""

    def before_unit_first_forward(self, device: PlanDevice, stage: StageUnits, unit: ShardingUnit) -> None:
        """The first micro-batch of a step comes to a unit."""

    def after_stage_first_forward(self, device: PlanDevice, stage: StageUnits) -> None:
        """The first micro-batch has left a stage."""

    def compute_kept_gradient_bytes(self, parameter: ParameterSpec) -> float:
        """Bytes of a gradient that stay when its first micro-batch is over, beyond what was there before."""
        return 0.0 if self.keeps_gradients else float(parameter.numel * self.parameter_itemsize)

    def compute_added_bytes(self, parameter: ParameterSpec) -> float:
        """Bytes read and written to add a gradient to that of earlier micro-batches."""
        return 3.0 * parameter.numel * self.parameter_itemsize

    def takes_each_gradient(self, *, is_last_backward: bool) -> bool:
        """Whether each after_gradient of a backward is told of, by `after_gradient`, as it is complete."""
        return False

    def after_gradient(
        self,
        device: PlanDevice,
        stage: StageUnits,
        unit: ShardingUnit,
        parameter: ParameterSpec,
        *,
        is_first_micro_batch: bool,
    ) -> None:
        """Where they are told of: one is complete."""

    def compute_accumulation_bytes(self, unit: ShardingUnit) -> float:
        """What a CPU needs for a moment to add a unit's gradients, one by one, to those of another format."""
        return 0.0

    def after_unit_backward(self, device: PlanDevice, stage: StageUnits, unit: ShardingUnit) -> None:
        """A block of a stage has run backward."""

    def after_stage_last_backward(self, device: PlanDevice, stage: StageUnits) -> None:
        """All micro-batches of a stage have run backward."""

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Gradients are set to None, or zero."""
        if not self.keeps_gradients:
            for stage in self.stages:
                device.free(name_stage_gradients(stage))


def name_stage_gradients(stage: StageUnits) -> str:
    """The name under which a stage's gradients are held."""
    return f"gradients {stage.index}"


class SingleCopyStagePlan(StagePlan):
    """One copy of the model."""

    @property
    def updated_tensors(self) -> list[UpdatedTensor]:
        """All parameters of the rank's stages that are trained."""
        return [parameter.updated_tensor for stage in self.stages for parameter in stage.trained_parameters]

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Gradients too, if they are kept."""
        super().allocate_persistent_state(device)
        if self.keeps_gradients:
            for stage in self.stages:
                gradient_bytes = stage.trained_numel * self.parameter_itemsize
                device.allocate(name_stage_gradients(stage), gradient_bytes, GRADIENT_MEMORY)


DDP_BUCKET_BYTES = 25 * MIB
"""Of DDP, torch's default."""


class ReplicatedStagePlan(SingleCopyStagePlan):
    """DDP around each stage, whose gradients are views of its buckets when a step is over."""

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Buckets, in which kept gradients are."""
        super().allocate_persistent_state(device)
        for stage in self.stages:
            device.free(name_stage_gradients(stage))
            bucket_numel = self._count_bucket_elements(stage)
            device.allocate(f"buckets {stage.index}", bucket_numel * self.parameter_itemsize, GRADIENT_MEMORY)
            if self.keeps_gradients:
                expert_bytes = (stage.trained_numel - bucket_numel) * self.parameter_itemsize
                device.allocate(name_stage_gradients(stage), expert_bytes, GRADIENT_MEMORY)

    def list_reductions(self, stage: StageUnits) -> Sequence[PlannedCollective]:
        """Buckets of equal size; then, one by one, experts that DDP leaves alone."""
        size = self._count_bucket_elements(stage) * self.parameter_itemsize
        num_buckets = max(1.0, size / DDP_BUCKET_BYTES)
        buckets = PlannedCollective("all-reduce", size / num_buckets, DATA_GROUP, num_buckets, in_backward=True)
        experts = [
            PlannedCollective("all-reduce", parameter.numel * self.parameter_itemsize, EXPERT_DATA_GROUP)
            for parameter in stage.trained_parameters
            if parameter.is_expert
        ]
        return [buckets, *experts]

    @staticmethod
    def _count_bucket_elements(stage: StageUnits) -> int:
        return sum(parameter.numel for parameter in stage.trained_parameters if not parameter.is_expert)

    def takes_each_gradient(self, *, is_last_backward: bool) -> bool:
        return is_last_backward

    def after_gradient(
        self,
        device: PlanDevice,
        stage: StageUnits,
        unit: ShardingUnit,
        parameter: ParameterSpec,
        *,
        is_first_micro_batch: bool,
    ) -> None:
        """Into its bucket; what was accumulated is freed."""
        if self.keeps_gradients:
            return
        size, gradients_name = parameter.numel * self.parameter_itemsize, name_stage_gradients(stage)
        if parameter.is_expert:  # stays as it is
            if is_first_micro_batch:
                device.grow_allocation(gradients_name, size, GRADIENT_MEMORY)
        elif is_first_micro_batch:
            device.allocate("copied into bucket", size, GRADIENT_MEMORY)
            device.free("copied into bucket")
        else:
            device.grow_allocation(gradients_name, -size, GRADIENT_MEMORY)


MAX_STAGES_GATHERED_AHEAD = 3
"""Stages that torch's interleaved schedules have gathered at a time (``_add_unshard_reshard``)."""


class ShardedStagePlan(StagePlan):
    """FSDP2 around each stage and each of its blocks, over so many copies, of which there may be replicas."""

    def __init__(
        self,
        stages: Sequence[StageUnits],
        inputs: PlanInputs,
        num_copies: int,
        *,
        shard_group: str = SHARD_GROUP,
        num_replicas: int = 1,
    ) -> None:
        super().__init__(stages, inputs)
        self._num_copies = self.num_shards = num_copies
        self._shard_group = shard_group
        self._num_replicas = num_replicas
        self._compute_itemsize = inputs.precision.compute_itemsize
        self._reduce_itemsize = inputs.reduce_itemsize
        self._accumulated_units: set[tuple[int, int]] = set()

    @property
    def updated_tensors(self) -> list[UpdatedTensor]:
        """The first copy's shards, which are never smaller than the others'."""
        return [
            parameter.build_first_shard(self._count_shards(parameter), self._choose_dimension(parameter))
            for stage in self.stages
            for parameter in stage.trained_parameters
        ]

    @property
    def parameter_numel(self) -> int:
        """Of the first copy's shards."""
        return sum(self._count_shard_elements(stage.parameters) for stage in self.stages)

    def _count_shards(self, parameter: ParameterSpec) -> int:
        """Ranks that a parameter is sharded over."""
        expert_shards = self.inputs.expert_shards
        return expert_shards if parameter.is_expert and expert_shards is not None else self._num_copies

    def _choose_dimension(self, parameter: ParameterSpec) -> int:
        """Along which it is cut."""
        return parameter.choose_expert_dimension(self._count_shards(parameter)) if parameter.is_expert else 0

    def _count_unit_shards(self, unit: ShardingUnit) -> int:
        return self._count_shards(unit.parameters[0]) if unit.parameters else self._num_copies

    def _find_shard_group(self, unit: ShardingUnit) -> str:
        return EXPERT_SHARD_GROUP if any(spec.is_expert for spec in unit.parameters[:1]) else self._shard_group

    def _count_shard_elements(self, parameters: Iterable[ParameterSpec]) -> int:
        """Of the first copy's shards of these parameters."""
        return sum(
            parameter.compute_first_shard_numel(self._count_shards(parameter), self._choose_dimension(parameter))
            for parameter in parameters
        )

    def _compute_padded_bytes(self, unit: ShardingUnit) -> int:
        """Of a unit's whole parameters as they are gathered."""
        return self._count_shard_elements(unit.parameters) * self._count_unit_shards(unit) * self._compute_itemsize

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Shards of gradients too, if they are kept."""
        super().allocate_persistent_state(device)
        if self.keeps_gradients:
            device.allocate("gradient shards", sum(self.updated_numels) * self.parameter_itemsize, GRADIENT_MEMORY)

    gathers_units = True

    def list_gathers(self, stage: StageUnits) -> Sequence[PlannedCollective]:
        return [
            PlannedCollective("all-gather", unit.numel * self._compute_itemsize, self._find_shard_group(unit))
            for unit in stage.units
            if unit.parameters
        ]

    def list_reductions(self, stage: StageUnits) -> Sequence[PlannedCollective]:
        """Unit by unit, among shards and then among replicas."""
        collectives = []
        for unit in filter(attrgetter("trained_parameters"), stage.units):
            size = unit.trained_numel * self._reduce_itemsize
            collectives.append(PlannedCollective("reduce-scatter", size, self._find_shard_group(unit)))
            if self._num_replicas > 1:
                shard_bytes = size / self._count_unit_shards(unit)
                collectives.append(PlannedCollective("all-reduce", shard_bytes, REPLICA_GROUP))
        return collectives

    def begin_step(self, device: PlanDevice, *, gathers_ahead: bool) -> None:
        """Stages that are gathered ahead arrive in buffers."""
        for stage in self.stages[: MAX_STAGES_GATHERED_AHEAD if gathers_ahead else 0]:
            for unit in stage.units:
                device.allocate(
                    f"buffer {stage.index} {unit.index}",
                    self._compute_padded_bytes(unit),
                    ALL_GATHER_MEMORY,
                )

    def before_unit_first_forward(self, device: PlanDevice, stage: StageUnits, unit: ShardingUnit) -> None:
        """Copy it out of the buffer, which lives until the next unit is copied out."""
        unsharded_bytes = self._compute_padded_bytes(unit)
        buffer_name = f"buffer {stage.index} {unit.index}"
        device.free(buffer_name)
        device.allocate(f"buffer {stage.index}", unsharded_bytes, ALL_GATHER_MEMORY)
        device.allocate(f"whole {stage.index} {unit.index}", unsharded_bytes, ALL_GATHER_MEMORY)

    def after_stage_first_forward(self, device: PlanDevice, stage: StageUnits) -> None:
        device.free(f"buffer {stage.index}")

    def compute_accumulation_bytes(self, unit: ShardingUnit) -> float:
        """The largest of them, converted."""
        return (
            max((parameter.numel for parameter in unit.trained_parameters), default=0) * self._reduce_itemsize
            if self._converts_gradients
            else 0.0
        )

    def compute_kept_gradient_bytes(self, parameter: ParameterSpec) -> float:
        """Whole, in the format it is computed in, unless it is converted as soon as its unit is over."""
        return 0.0 if self._converts_gradients else float(parameter.numel * self._compute_itemsize)

    def compute_added_bytes(self, parameter: ParameterSpec) -> float:
        """Those that are there have the format they are reduced in."""
        return float(parameter.numel * (self._compute_itemsize + 2 * self._reduce_itemsize))

    @property
    def _converts_gradients(self) -> bool:
        return self._reduce_itemsize != self._compute_itemsize

    def takes_each_gradient(self, *, is_last_backward: bool) -> bool:
        """Where gradients are converted unit by unit."""
        return self._converts_gradients

    def after_gradient(
        self,
        device: PlanDevice,
        stage: StageUnits,
        unit: ShardingUnit,
        parameter: ParameterSpec,
        *,
        is_first_micro_batch: bool,
    ) -> None:
        """It waits for the others of its unit."""
        device.grow_allocation(
            f"computed {stage.index} {unit.index}", parameter.numel * self._compute_itemsize, GRADIENT_MEMORY
        )

    def after_unit_backward(self, device: PlanDevice, stage: StageUnits, unit: ShardingUnit) -> None:
        """Gradients are converted to the format they are reduced in, or added to those that are there in it."""
        if not self._converts_gradients:
            return
        name = f"accumulated {stage.index} {unit.index}"
        if (stage.index, unit.index) not in self._accumulated_units:
            self._accumulated_units.add((stage.index, unit.index))
            device.allocate(name, unit.trained_numel * self._reduce_itemsize, GRADIENT_MEMORY)
        device.free(f"computed {stage.index} {unit.index}")

    def after_stage_last_backward(self, device: PlanDevice, stage: StageUnits) -> None:
        """Reduce unit by unit: whole parameters go, gradients are copied into a buffer, a shard comes out."""
        gradients_name = name_stage_gradients(stage)
        for unit in stage.units:
            device.free(f"whole {stage.index} {unit.index}")
            if not unit.trained_parameters:
                continue
            shard_numel = self._count_shard_elements(unit.trained_parameters)
            reduced_bytes = shard_numel * self._count_unit_shards(unit) * self._reduce_itemsize
            device.free("reduce input")
            device.allocate("reduce input", reduced_bytes, REDUCTION_MEMORY)
            if self.inputs.is_on_cpu:
                allocate_copy_in_briefly(
                    device,
                    unit.trained_parameters,
                    self._count_unit_shards(unit),
                    self._reduce_itemsize,
                    self._reduce_itemsize,
                )
            if self._converts_gradients:
                device.free(f"accumulated {stage.index} {unit.index}")
            else:
                device.grow_allocation(gradients_name, -unit.trained_numel * self._compute_itemsize, GRADIENT_MEMORY)
            shard_name = f"gradient shard {stage.index} {unit.index}"
            device.allocate(shard_name, shard_numel * self._reduce_itemsize, GRADIENT_MEMORY)
            if self._reduce_itemsize != self.parameter_itemsize:
                device.allocate("converted shard", shard_numel * self.parameter_itemsize, GRADIENT_MEMORY)
                device.free(shard_name)
                device.allocate(shard_name, shard_numel * self.parameter_itemsize, GRADIENT_MEMORY)
                device.free("converted shard")
        device.free("reduce input")
        device.free(gradients_name)
        self._accumulated_units.clear()

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Shards of gradients are set to None."""
        for stage in self.stages:
            for unit in stage.units:
                device.free(f"gradient shard {stage.index} {unit.index}")
