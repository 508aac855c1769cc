"""ZeRO stage 1: DDP, and optimizer state that is divided among the ranks (`ZeroRedundancyOptimizer`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from bench.precision import Precision
from bench.strategies.base import BuildOptimizer
from bench.strategies.ddp import DDP, DDPPlan
from bench.strategies.plan import GATHER, WORLD, Device, Parameter, Plan, Setting


@dataclass(frozen=True)
class ZeRO1(DDP):
    """Every rank has the whole model and all gradients; each updates a part of the parameters and sends it around.

    Whole parameters are given to ranks, the largest first, always to the rank that has least so far.
    """

    parameters_as_bucket_view: bool = False
    """Parameters of a rank's part lie one behind the other and are sent as one."""

    def effective(self, world_size: int) -> str:
        """Always the same."""
        return "zero1"

    def optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """This rank's part of the optimizer, which also exchanges the updated parameters."""
        return ZeroRedundancyOptimizer(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            optimizer_class=build,  # type: ignore[arg-type]
            parameters_as_bucket_view=self.parameters_as_bucket_view,
        )

    def state_bytes(self, precision: Precision, states_per_parameter: int, world_size: int) -> float:
        """Every rank's parameters and gradients, and one copy of the optimizer's states."""
        return precision.parameter_dtype.itemsize * (2 * world_size + states_per_parameter)

    def plan(self, setting: Setting) -> Plan:
        """As DDP, with the optimizer divided."""
        return ZeRO1Plan(self, setting)


class ZeRO1Plan(DDPPlan):
    """DDP's, and after the optimizer's step a broadcast of every part from the rank that updated it."""

    def __init__(self, strategy: ZeRO1, setting: Setting) -> None:
        super().__init__(strategy, setting)
        self._together = strategy.parameters_as_bucket_view
        self._parts = partition(setting.trained, setting.world_size)

    @property
    def updated(self) -> Sequence[int]:
        """Those of the rank that has most."""
        return max(([parameter.numel for parameter in part] for part in self._parts), key=sum)

    def after_optimizer(self, device: Device) -> None:
        """Everybody sends what it has updated; then gradients go, as DDP's do."""
        sent = []
        for rank, part in enumerate(self._parts):
            sizes = [parameter.numel * self.setting.parameter_bytes for parameter in part]
            for number, size in enumerate([sum(sizes)] if self._together else sizes):
                sent.append(f"updated {rank}.{number}")
                device.send(sent[-1], "broadcast", size, WORLD, GATHER, after="compute")
        for name in sent:
            device.wait(name)
        super().after_optimizer(device)


def partition(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """The parameters that each rank updates: the largest first, to the rank that has least so far.

    As ``ZeroRedundancyOptimizer._partition_parameters`` in torch 2.13 does.
    """
    parts: list[list[Parameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda parameter: parameter.numel, reverse=True):
        rank = sizes.index(min(sizes))
        parts[rank].append(parameter)
        sizes[rank] += parameter.numel
    return parts
