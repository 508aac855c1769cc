"""What one rank of a pipeline holds from one micro-batch to the next, alone and under DDP.

Read in torch 2.13 (``torch/distributed/pipelining/stage.py``): under DDP gradients accumulate as tensors of their own,
and are copied into the buckets in the last backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.core.units import MIB
from bench.optimizers import UpdatedTensor
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.step_plan import (
    DATA_GROUP,
    EXPERT_DATA_GROUP,
    GRADIENT_MEMORY,
    PARAMETER_MEMORY,
    WORLD_GROUP,
    PlanDevice,
    RankPlan,
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
