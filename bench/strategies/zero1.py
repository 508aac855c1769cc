"""ZeRO stage 1: DDP, and optimizer state that is divided among ranks (`ZeroRedundancyOptimizer`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.core.precision import Precision
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.optimizers import UpdatedTensor
from bench.strategies.base import BuildOptimizer, Strategy
from bench.strategies.ddp import DDPPlan, DDPStrategy
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs
from bench.strategies.requirements import parse_rank_count
from bench.strategies.step_plan import ALL_GATHER_STREAM, SHARD_GROUP, WORLD_GROUP, PlanDevice, StepPlan

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

DIVIDED_OPTIMIZER_MODULE = "torch.distributed.optim"
"""Which brings torch's compiler along: half a second."""


def build_divided_optimizer(
    parameters: Sequence[nn.Parameter],
    build: BuildOptimizer,
    group: dist.ProcessGroup | None,
    *,
    parameters_as_bucket_view: bool = False,
) -> torch.optim.Optimizer:
    """This rank's part of the optimizer, which also exchanges the updated parameters within a group (None: all)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        parameters,
        optimizer_class=build,  # type: ignore[arg-type]
        process_group=group,
        parameters_as_bucket_view=parameters_as_bucket_view,
    )


@dataclass(frozen=True)
class ZeRO1Strategy(DDPStrategy):
    """Every rank has the whole model and all gradients; each updates a part of the parameters and sends it around.

    Whole parameters are given to ranks, the largest first, always to the rank that has least so far. Where
    `sharding_factor` is less than the world size, optimizer state is divided among so many consecutive ranks, and
    parameters are sent among these (InternEvo's ZeRO-1 within a node, Megatron-Core's
    ``num_distributed_optimizer_instances``). In a resolved strategy 1 stands for all ranks, as in rows of before there
    was a choice.
    """

    presentation = Presentation(
        label="ZeRO-1",
        position=30,
        colour="#8772e6",
        kinds={"": ("", ""), "hybrid": ("hybrid", "#5f48bd")},
        markers={"": "P", "hybrid": "p"},
    )
    training_terms = (
        TrainingTerm(
            "ZeRO-1",
            ("strategy=zero1",),
            "a copy fits once its optimizer state is divided",
            divides=("optimizer state",),
        ),
    )
    training_options = (
        TrainingOption(
            "ZeRO-1",
            {"strategy": "zero1"},
            "a whole copy of the model, optimizer state divided among the GPUs",
            leaves={"DDP": 2, "DDP across nodes": 2},
        ),
    )

    min_sharding_factor: ClassVar[int] = 2

    parameters_as_bucket_view: bool = False
    """Parameters of a rank's part lie one behind the other and are sent as one."""

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As DDP, and `sharding_factor` as a number: 1 for all ranks."""
        field, min_ranks = "strategy.sharding_factor", min(self.min_sharding_factor, world_size)
        factor = parse_rank_count(
            field, self.sharding_factor, world_size, ranks_per_node, min_ranks, alternative="strategy=ddp"
        )
        strategy = dataclasses.replace(self, sharding_factor=1)
        resolved = super(ZeRO1Strategy, strategy).resolve(world_size, ranks_per_node, accumulates=accumulates)
        return dataclasses.replace(resolved, sharding_factor=1 if factor == world_size else factor)

    @property
    def is_hybrid(self) -> bool:
        """Whether the optimizer state of the resolved strategy is divided among a part of the ranks."""
        return self.resolved_sharding_factor > 1

    @property
    def num_parameter_shards(self) -> int:
        return 1

    def count_divided_ranks(self, world_size: int) -> int:
        """Of optimizer state."""
        return self.resolved_sharding_factor if self.is_hybrid else world_size

    def describe_effective_strategy(self, world_size: int) -> str:
        return "zero1/hybrid" if self.is_hybrid else "zero1"

    def list_preload_modules(self, device: str) -> tuple[str, ...]:
        return (DIVIDED_OPTIMIZER_MODULE,)

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        group = None
        if self.is_hybrid:
            shape = (dist.get_world_size() // self.resolved_sharding_factor, self.resolved_sharding_factor)
            mesh = init_device_mesh(parameters[0].device.type, shape, mesh_dim_names=("replicate", "shard"))
            group = mesh["shard"].get_group()
        return build_divided_optimizer(
            parameters, build, group, parameters_as_bucket_view=self.parameters_as_bucket_view
        )

    def compute_state_bytes_per_parameter(
        self, precision: Precision, states_per_parameter: float, world_size: int
    ) -> float:
        """Every rank's parameters and gradients, and a copy of the optimizer's states for each group."""
        state_copies = world_size // self.count_divided_ranks(world_size)
        return precision.parameter_itemsize * (2 * world_size + state_copies * states_per_parameter)

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """As DDP, with the optimizer divided."""
        return ZeRO1Plan(self, inputs)


class ZeRO1Plan(DDPPlan):
    """DDP's, and after the optimizer's step a broadcast of every part from the rank that updated it."""

    def __init__(self, strategy: ZeRO1Strategy, inputs: PlanInputs) -> None:
        super().__init__(strategy, inputs)
        self._sends_partition_as_one = strategy.parameters_as_bucket_view
        num_ranks = strategy.count_divided_ranks(inputs.world_size)
        self._partitions = partition_parameters(inputs.trained_parameters, num_ranks)
        self._state_group = SHARD_GROUP if strategy.is_hybrid else WORLD_GROUP

    @property
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        """Those of the rank that has most."""
        largest = max(self._partitions, key=lambda partition: sum(parameter.numel for parameter in partition))
        return [parameter.updated_tensor for parameter in largest]

    @property
    def clipped_numels(self) -> Sequence[int]:
        """Every rank has all gradients."""
        return [parameter.numel for parameter in self.inputs.trained_parameters]

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Every rank sends what it has updated; then gradients go, as DDP's do."""
        events = []
        for rank, partition in enumerate(self._partitions):
            parameter_bytes = [parameter.numel * self.inputs.parameter_itemsize for parameter in partition]
            for number, broadcast_bytes in enumerate(
                [sum(parameter_bytes)] if self._sends_partition_as_one else parameter_bytes
            ):
                events.append(f"updated {rank}.{number}")
                device.run_collective(
                    events[-1], "broadcast", broadcast_bytes, self._state_group, ALL_GATHER_STREAM, after="compute"
                )
        for name in events:
            device.wait_for_event(name)
        super().after_optimizer_step(device)


def partition_parameters(parameters: Sequence[ParameterSpec], num_ranks: int) -> list[list[ParameterSpec]]:
    """The parameters that each rank updates: the largest first, to the rank that has least so far.

    As ``ZeroRedundancyOptimizer._partition_parameters`` in torch 2.13 does.
    """
    partitions: list[list[ParameterSpec]] = [[] for _ in range(num_ranks)]
    partition_numels = [0] * num_ranks
    for parameter in sorted(parameters, key=lambda parameter: parameter.numel, reverse=True):
        rank = partition_numels.index(min(partition_numels))
        partitions[rank].append(parameter)
        partition_numels[rank] += parameter.numel
    return partitions
