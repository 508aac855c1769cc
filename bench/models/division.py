"""How a model's layers are divided among ranks: what a family states for tensor parallelism, in torch's own styles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

SEQUENCE = Shard(1)
"""The dimension of hidden states that sequence parallelism divides."""


@dataclass
class Division:
    """The parts of one model that are not whole on every rank, and what else changes because of it."""

    styles: list[tuple[nn.Module, ParallelStyle]] = field(default_factory=list)
    """Modules, and how each is divided; applied in this order."""
    counts: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Modules and those of their attributes that count what a rank has a part of: heads, or the width of all heads."""
    fused: dict[str, int] = field(default_factory=dict)
    """Parameters that hold several matrices one beside the other on their last dimension, by name, and how many: each
    of them is divided."""

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide a model, which is on meta, over a mesh of one dimension. Tied parameters stay tied."""
        before = {
            (module, name): parameter
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        for module, style in self.styles:
            parallelize_module(module, mesh, style, src_data_rank=None)
        divided: dict[nn.Parameter, nn.Parameter] = {}
        for (module, name), parameter in before.items():
            module.register_parameter(name, divided.setdefault(parameter, module.get_parameter(name)))
        for module, attribute in self.counts:
            setattr(module, attribute, getattr(module, attribute) // mesh.size())

    def arranged(self, name: str, whole: torch.Tensor, degree: int) -> torch.Tensor:
        """A whole parameter with its last dimension in such an order that equal parts of it are what ranks have.

        Of a fused one a rank has a part of each matrix.
        """
        parts = self.fused.get(name, 1)
        if parts == 1:
            return whole
        matrices = whole.unflatten(-1, (parts, degree, -1))
        return matrices.transpose(-3, -2).flatten(-3)


class ColwiseConv1D(ColwiseParallel):
    """`ColwiseParallel` for transformers' Conv1D, a linear layer whose weight is the other way round."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _divide(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class RowwiseConv1D(RowwiseParallel):
    """`RowwiseParallel` for transformers' Conv1D."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return _divide(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()})


def _divide(
    style: ColwiseParallel | RowwiseParallel, module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]
) -> nn.Module:
    """Divide a module's own parameters, and have inputs and outputs prepared as the style says."""

    def partition(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, mesh, [placements[name]], src_data_rank=style.src_data_rank)
            module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))

    return distribute_module(
        module,
        mesh,
        partition,
        partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts),
        partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
    )


def first_argument_divided(arguments: int) -> PrepareModuleInput:
    """The first of so many positional arguments is divided over the sequence, as it comes in whole."""
    others = (None,) * (arguments - 1)
    return PrepareModuleInput(
        input_layouts=(Replicate(), *others), desired_input_layouts=(SEQUENCE, *others), use_local_output=True
    )


def unwrapped(path: str) -> str:
    """A module's path as it is without the wrappers of checkpointing."""
    return path.replace(_CHECKPOINT_PREFIX, "")
