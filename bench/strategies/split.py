"""A model's layers split over ranks: what tensor parallelism does to a model before anything else wraps it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.utils import parametrize

from bench.models import Family
from bench.models.division import Division


@dataclass(frozen=True)
class Split:
    """Over how many ranks every layer is split, and how."""

    degree: int
    sequence_parallel: bool
    """What lies between the layers is divided over the sequence."""

    def divide(self, family: Family, model: nn.Module, mesh: DeviceMesh) -> Division:
        """Divide a model that is on meta: its layers' parameters become DTensors on the mesh of their ranks."""
        division = family.division(model, sequence_parallel=self.sequence_parallel)
        division.apply(model, mesh)
        return division


def localize(model: nn.Module) -> None:
    """Turn parameters that are DTensors into plain ones, each rank's part, which layers see as DTensors still.

    So that what knows nothing of DTensors can own them: DDP's buckets, any optimizer. Their gradients are complete:
    where ranks have the same parameter and different gradients, these are added up in backward. Tied ones stay tied.
    """
    local: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                own = parameter.to_local().detach()
                plain = local.setdefault(id(parameter), nn.Parameter(own, requires_grad=parameter.requires_grad))
                module.register_parameter(name, plain)
                parametrize.register_parametrization(module, name, _AsDTensor(parameter._spec), unsafe=True)


class _AsDTensor(nn.Module):
    """A rank's part of a parameter, as the DTensor it is a part of."""

    def __init__(self, spec: DTensorSpec) -> None:
        super().__init__()
        self._spec = spec

    def forward(self, local: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
