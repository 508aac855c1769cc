"""What one rank of a pipeline holds from one micro-batch to the next under FSDP.

Read in torch 2.13 (``torch/distributed/pipelining/stage.py``): whole parameters stay from the first use of a stage
until its last backward is over, and so do whole gradients, which are then reduced unit by unit, what lies outside the
blocks first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from bench.optimizers import UpdatedTensor
from bench.strategies.pipeline.step_plans import PlannedCollective, StagePlan, StageUnits, name_stage_gradients
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    EXPERT_SHARD_GROUP,
    GRADIENT_MEMORY,
    REDUCTION_MEMORY,
    REPLICA_GROUP,
    SHARD_GROUP,
    PlanDevice,
    allocate_copy_in_briefly,
)

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
