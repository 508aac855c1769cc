"""What a rank of a mesh stores and sends: the plans of its data parallelism, over what it has of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.core.errors import ImpossibleError
from bench.optimizers import UpdatedTensor
from bench.strategies.ddp import DDPPlan, DDPStrategy
from bench.strategies.fsdp.strategy import FSDP2Strategy
from bench.strategies.mesh.knobs import DDP_KIND, FSDP_KIND, NO_DATA_PARALLEL
from bench.strategies.mesh.layout import (
    CONTEXT,
    EXPERT,
    PIPELINE,
    REPLICAS,
    REPLICATING_DIMS,
    SHARDS,
    TENSOR,
    MeshLayout,
)
from bench.strategies.pipeline.sharded_stage_plan import ShardedStagePlan
from bench.strategies.pipeline.step_plans import (
    PlannedCollective,
    ReplicatedStagePlan,
    SingleCopyStagePlan,
    StagePlan,
    StageUnits,
)
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.step_plan import (
    CONTEXT_GROUP,
    DATA_GROUP,
    EXPERT_DATA_GROUP,
    EXPERT_GROUP,
    EXPERT_SHARD_GROUP,
    GRADIENT_MEMORY,
    PIPELINE_GROUP,
    REDUCE_STREAM,
    REPLICA_GROUP,
    SHARD_GROUP,
    TENSOR_GROUP,
    WORLD_GROUP,
    GroupDim,
    PlanDevice,
    ReplicatedPlan,
    StepPlan,
    name_unit_gradients,
)
from bench.strategies.zero1 import ZeRO1Strategy, partition_parameters

if TYPE_CHECKING:
    from bench.strategies.mesh.strategy import MeshStrategy

GROUP_DIMS = {
    TENSOR_GROUP: (TENSOR,),
    CONTEXT_GROUP: (CONTEXT,),
    PIPELINE_GROUP: (PIPELINE,),
    SHARD_GROUP: (SHARDS, EXPERT, CONTEXT),
    EXPERT_SHARD_GROUP: (SHARDS, CONTEXT),
    REPLICA_GROUP: (REPLICAS,),
    EXPERT_DATA_GROUP: (REPLICAS, SHARDS, CONTEXT),
    DATA_GROUP: REPLICATING_DIMS,
    WORLD_GROUP: REPLICATING_DIMS,
}
"""The dimensions of a mesh that the ranks of a plan's group are spread over, whatever the layout."""


def find_group_dims(layout: MeshLayout, group_name: str) -> tuple[str, ...]:
    """The dimensions that the ranks of a plan's group are spread over."""
    return layout.expert_dims if group_name == EXPERT_GROUP else GROUP_DIMS[group_name]


def list_mesh_group_dims(layout: MeshLayout, group_name: str) -> list[GroupDim]:
    """Where the ranks of a plan's group are, innermost dimension first."""
    dims, stride = [], 1
    for name, degree in reversed(layout.degrees):
        if name in find_group_dims(layout, group_name):
            dims.append(GroupDim(degree, stride))
        stride *= degree
    return dims


def count_mesh_process_groups(layout: MeshLayout, data: str) -> int:
    """The world, a dimension of several ranks each, and those that several dimensions are flattened to."""
    num_dims = sum(degree > 1 for _, degree in layout.degrees)
    groups = [EXPERT_GROUP, *([SHARD_GROUP, EXPERT_SHARD_GROUP] if data == FSDP_KIND else [DATA_GROUP])]
    all_names = [find_group_dims(layout, group) for group in groups]
    flattened = {tuple(name for name in names if layout.get_degree(name) > 1) for names in all_names}
    return 1 + num_dims + sum(len(names) > 1 for names in flattened)


def plan_mesh_step(strategy: MeshStrategy, inputs: PlanInputs) -> StepPlan:
    """The plan of a rank that has all blocks."""
    layout = strategy.layout
    inputs = dataclasses.replace(
        inputs, world_size=layout.get_degree(*REPLICATING_DIMS), expert_shards=count_expert_shards(strategy)
    )
    if strategy.data == NO_DATA_PARALLEL:
        return ReplicatedPlan(inputs)
    if strategy.data == FSDP_KIND:
        return build_inner_fsdp(strategy).plan(inputs)
    knobs = {"sharding_factor": 1, "bucket_cap_mb": None, "gradient_as_bucket_view": True, "static_graph": False}
    if strategy.data == DDP_KIND:
        return MeshDDPPlan(DDPStrategy(name=DDP_KIND, **knobs), inputs)  # type: ignore[arg-type]
    return ZeRO1Strategy(name="zero1", parameters_as_bucket_view=False, **knobs).plan(inputs)  # type: ignore[arg-type]


def count_expert_shards(strategy: MeshStrategy) -> int | None:
    """Ranks that FSDP shards experts over; None where that is as all else."""
    if not strategy.shards_experts_separately:
        return None
    return strategy.layout.get_degree(*GROUP_DIMS[EXPERT_SHARD_GROUP])


class MeshDDPPlan(DDPPlan):
    """DDP's, which leaves experts alone that other ranks have than have the rest: their gradients stay as autograd
    leaves them, and are averaged one by one when backward is over."""

    @property
    def total_gradient_numel(self) -> int:
        """Of what is in buckets."""
        return sum(spec.numel for spec in self.inputs.trained_parameters if not spec.is_expert)

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Experts' gradients too, if they are kept."""
        super().allocate_persistent_state(device)
        if self.inputs.keep_gradients:
            for unit, parameter in self._list_experts():
                self._hold_gradient(device, unit, parameter)

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        if not parameter.is_expert:
            super().after_gradient(device, unit, parameter)
        elif not self.inputs.keep_gradients:
            self._hold_gradient(device, unit, parameter)

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        super().after_micro_batch_backward(device)
        if not self._synchronize:
            return
        for unit, parameter in self._list_experts():
            size, name = self.compute_gradient_bytes(parameter), f"expert {unit.index} {parameter.name}"
            device.run_collective(name, "all-reduce", size, EXPERT_DATA_GROUP, REDUCE_STREAM, after="compute")
            device.wait_for_event(name)
            device.copy_within_device("mean", 2 * size)

    def _list_experts(self) -> list[tuple[ShardingUnit, ParameterSpec]]:
        return [(unit, spec) for unit in self.inputs.units for spec in unit.trained_parameters if spec.is_expert]

    def _hold_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        name = f"{name_unit_gradients(unit)} {parameter.name}"
        device.allocate(name, self.compute_gradient_bytes(parameter), GRADIENT_MEMORY)


def build_inner_fsdp(strategy: MeshStrategy) -> FSDP2Strategy:
    """What shards each rank's part of the model over shards, experts and context."""
    layout = strategy.layout
    return FSDP2Strategy(
        name=FSDP_KIND,
        sharding_factor=layout.get_degree(SHARDS, EXPERT, CONTEXT),
        reshard_after_forward=bool(strategy.reshard_after_forward),
        forward_prefetch=False,
        blocks_per_unit=1,
        cpu_offload=False,
        backward_prefetch=True,
        mesh_2d=layout.get_degree(REPLICAS) > 1,
    )


def plan_mesh_stages(strategy: MeshStrategy, stages: Sequence[StageUnits], inputs: PlanInputs) -> StagePlan:
    """The plan of a rank of a pipeline."""
    layout = strategy.layout
    if strategy.data == FSDP_KIND:
        if strategy.reshard_after_forward:
            raise ImpossibleError(
                "strategy.reshard_after_forward=true is not valid with mode=predict of a pipeline, which would gather "
                "parameters for every micro-batch: when schedules do so is not stated. Choose null, or mode=measure."
            )
        inputs = dataclasses.replace(inputs, expert_shards=count_expert_shards(strategy))
        return ShardedStagePlan(
            stages, inputs, layout.get_degree(SHARDS, EXPERT, CONTEXT), num_replicas=layout.get_degree(REPLICAS)
        )
    if strategy.data == NO_DATA_PARALLEL:
        return SingleCopyStagePlan(stages, inputs)
    if strategy.data == DDP_KIND:
        return ReplicatedStagePlan(stages, inputs)
    return DividedStateStagePlan(stages, inputs, layout.get_degree(*REPLICATING_DIMS))


class DividedStateStagePlan(ReplicatedStagePlan):
    """ZeRO-1 around the stages of a rank: DDP's buckets, and optimizer state divided among the copies."""

    def __init__(self, stages: Sequence[StageUnits], inputs: PlanInputs, num_copies: int) -> None:
        super().__init__(stages, inputs)
        self._partitions = partition_parameters(
            [parameter for stage in stages for parameter in stage.trained_parameters], num_copies
        )

    @property
    def updated_tensors(self) -> list[UpdatedTensor]:
        """Those of the copy that has most."""
        largest = max(self._partitions, key=lambda partition: sum(parameter.numel for parameter in partition))
        return [parameter.updated_tensor for parameter in largest]

    def list_update_broadcasts(self) -> Sequence[PlannedCollective]:
        """Every parameter from the copy that has updated it."""
        return [
            PlannedCollective("broadcast", parameter.numel * self.parameter_itemsize, DATA_GROUP)
            for partition in self._partitions
            for parameter in partition
        ]
