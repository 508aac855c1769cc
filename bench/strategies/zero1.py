"""ZeRO stage 1: DDP, and optimizer state that is divided among the ranks (`ZeroRedundancyOptimizer`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from bench.core.precision import Precision
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.optimizers import UpdatedTensor
from bench.strategies.base import BuildOptimizer
from bench.strategies.ddp import DDPPlan, DDPStrategy
from bench.strategies.step_plan import ALL_GATHER_STREAM, WORLD_GROUP, ParameterSpec, PlanDevice, PlanInputs, StepPlan


@dataclass(frozen=True)
class ZeRO1Strategy(DDPStrategy):
    """Every rank has the whole model and all gradients; each updates a part of the parameters and sends it around.

    Whole parameters are given to ranks, the largest first, always to the rank that has least so far.
    """

    presentation = Presentation(label="ZeRO-1", position=30, colour="#8772e6", markers={"": "P"})
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

    parameters_as_bucket_view: bool = False
    """Parameters of a rank's part lie one behind the other and are sent as one."""

    def describe_effective_strategy(self, world_size: int) -> str:
        return "zero1"

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """This rank's part of the optimizer, which also exchanges the updated parameters."""
        return ZeroRedundancyOptimizer(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            optimizer_class=build,  # type: ignore[arg-type]
            parameters_as_bucket_view=self.parameters_as_bucket_view,
        )

    def compute_state_bytes_per_parameter(
        self, precision: Precision, states_per_parameter: float, world_size: int
    ) -> float:
        """Every rank's parameters and gradients, and one copy of the optimizer's states."""
        return precision.parameter_dtype.itemsize * (2 * world_size + states_per_parameter)

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """As DDP, with the optimizer divided."""
        return ZeRO1Plan(self, inputs)


class ZeRO1Plan(DDPPlan):
    """DDP's, and after the optimizer's step a broadcast of every part from the rank that updated it."""

    def __init__(self, strategy: ZeRO1Strategy, inputs: PlanInputs) -> None:
        super().__init__(strategy, inputs)
        self._sends_partition_as_one = strategy.parameters_as_bucket_view
        self._partitions = partition_parameters(inputs.trained_parameters, inputs.world_size)

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
        """Everybody sends what it has updated; then gradients go, as DDP's do."""
        events = []
        for rank, partition in enumerate(self._partitions):
            parameter_bytes = [parameter.numel * self.inputs.parameter_itemsize for parameter in partition]
            for number, broadcast_bytes in enumerate(
                [sum(parameter_bytes)] if self._sends_partition_as_one else parameter_bytes
            ):
                events.append(f"updated {rank}.{number}")
                device.run_collective(
                    events[-1], "broadcast", broadcast_bytes, WORLD_GROUP, ALL_GATHER_STREAM, after="compute"
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
