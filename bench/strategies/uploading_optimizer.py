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
        self._device_parameters: list[nn.Parameter] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._storage_bytes: list[int] = []
        for parameter in self.param_groups[0]["params"]:
            device_parameter = nn.Parameter(torch.empty_like(_to_local_tensor(parameter), device=device))
            self._device_parameters.append(device_parameter)
            self._optimizers.append(build([device_parameter]))
            self._storage_bytes.append(device_parameter.untyped_storage().nbytes())
            device_parameter.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for parameter, device_parameter, optimizer, storage_bytes in zip(
            self.param_groups[0]["params"], self._device_parameters, self._optimizers, self._storage_bytes, strict=True
        ):
            if parameter.grad is None:
                continue
            local_parameter = _to_local_tensor(parameter)
            device_parameter.untyped_storage().resize_(storage_bytes)
            device_parameter.copy_(local_parameter, non_blocking=True)
            device_parameter.grad = _to_local_tensor(parameter.grad).to(device_parameter.device, non_blocking=True)
            optimizer.step()
            local_parameter.copy_(device_parameter)
            device_parameter.grad = None
            device_parameter.untyped_storage().resize_(0)

    def list_states(self) -> list[Any]:
        """The state of each parameter, on the device."""
        return [
            optimizer.state[device_parameter]
            for optimizer, device_parameter in zip(self._optimizers, self._device_parameters, strict=True)
        ]


def _to_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, its memory shared."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
