"""Ranks' parts of parameters, and the DTensors that they are parts of."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def build_dtensor(local_tensor: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """What a rank's part is a part of. Its gradient is the gradient's part."""
    return DTensor.from_local(
        local_tensor, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


class DTensorParametrization(nn.Module):
    """A rank's part of a parameter, as the DTensor it is a part of."""

    def __init__(self, spec: DTensorSpec) -> None:
        super().__init__()
        self._spec = spec

    def forward(self, local_tensor: torch.Tensor) -> torch.Tensor:
        return build_dtensor(local_tensor, self._spec)
