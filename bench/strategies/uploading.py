"""An optimizer whose parameters are on the CPU and whose states are on the device, where it updates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bench.strategies.base import BuildOptimizer


class UploadingOptimizer(torch.optim.Optimizer):
    """Takes one parameter after the other to the device with its gradient, updates it there and takes it back.

    FSDP2's offloading takes parameters and gradients to the CPU, and with them any optimizer built on them. Here each
    parameter has a twin on the device on which the optimizer that was asked for is built, so that its states are there
    to stay; the twin has memory only while it is updated.

    Parameters
    ----------
    parameters: iterable of nn.Parameter
        On the CPU, whole or sharded. Frozen ones stay there.
    build: callable
        Builds the optimizer that was asked for over some parameters.
    device: torch.device
        Where to update.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], build: BuildOptimizer, device: torch.device) -> None:
        super().__init__([parameter for parameter in parameters if parameter.requires_grad], {})
        self._twins: list[nn.Parameter] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._sizes: list[int] = []
        for parameter in self.param_groups[0]["params"]:
            twin = nn.Parameter(torch.empty_like(_local(parameter), device=device))
            self._twins.append(twin)
            self._optimizers.append(build([twin]))
            self._sizes.append(twin.untyped_storage().nbytes())
            twin.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for parameter, twin, optimizer, size in zip(
            self.param_groups[0]["params"], self._twins, self._optimizers, self._sizes, strict=True
        ):
            if parameter.grad is None:
                continue
            own = _local(parameter)
            twin.untyped_storage().resize_(size)
            twin.copy_(own, non_blocking=True)
            twin.grad = _local(parameter.grad).to(twin.device, non_blocking=True)
            optimizer.step()
            own.copy_(twin)
            twin.grad = None
            twin.untyped_storage().resize_(0)

    def states(self) -> list[Any]:
        """The state of each parameter, on the device."""
        return [optimizer.state[twin] for optimizer, twin in zip(self._optimizers, self._twins, strict=True)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, its memory shared."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
