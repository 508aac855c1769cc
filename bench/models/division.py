"""How a model's layers are divided among ranks: what a family states for tensor parallelism, in torch's own styles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

WHOLE = Replicate()
"""What every rank has all of."""

SEQUENCE_SHARD = Shard(1)
"""The dimension of hidden states that sequence parallelism divides."""


@dataclass(frozen=True)
class FusedMatrices:
    """Matrices that one parameter holds, one behind the other."""

    count: int
    dimension: int = -1
    """Of the parameter, along which they follow one another and are divided."""


@dataclass
class LayerDivision:
    """The parts of one model that are not whole on every rank, and what else changes because of it."""

    parallel_styles: list[tuple[nn.Module, ParallelStyle]] = field(default_factory=list)
    """Modules, and how each is divided; applied in this order."""
    divided_attributes: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Modules and those of their attributes that count what a rank has a part of: heads, or the width of all heads."""
    fused_matrices: dict[str, FusedMatrices] = field(default_factory=dict)
    """Parameters that hold several matrices, by name: each of them is divided."""

    def apply_to_model(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide a model, which is on meta, over a mesh of one dimension. Tied parameters stay tied."""
        original_parameters = {
            (module, name): parameter
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        for module, style in self.parallel_styles:
            divide_module(module, mesh, style)
        divided_parameters: dict[nn.Parameter, nn.Parameter] = {}
        for (module, name), parameter in original_parameters.items():
            module.register_parameter(name, divided_parameters.setdefault(parameter, module.get_parameter(name)))
        for module, attribute in self.divided_attributes:
            setattr(module, attribute, getattr(module, attribute) // mesh.size())

    def arrange_parameter(self, name: str, full_parameter: torch.Tensor, degree: int) -> torch.Tensor:
        """A whole parameter in such an order that equal parts of it are what ranks have.

        Of a fused one a rank has a part of each matrix.
        """
        fused = self.fused_matrices.get(name)
        if fused is None:
            return full_parameter
        dimension = fused.dimension % full_parameter.ndim
        matrices = full_parameter.unflatten(dimension, (fused.count, degree, -1))
        return matrices.transpose(dimension, dimension + 1).flatten(dimension, dimension + 2)


def divide_module(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Divide a module, which is on meta, in a style of torch's. Frozen parameters stay frozen: those that
    `SequenceParallel` replicates would not (torch 2.13)."""
    is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    parallelize_module(module, mesh, style, src_data_rank=None)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_trained[name])


class RowwiseEmbedding(ParallelStyle):
    """A table of embeddings divided over its rows: each rank looks up the tokens whose rows it has, and what the ranks
    found is added up, as in Megatron-LM (Shoeybi et al. 2019, section 3).

    `RowwiseParallel` does the same forward. Backward it computes the gradient of the whole table on every rank, for
    DTensor has no form of ``embedding_dense_backward`` that divides rows; and it hands on an `AsyncCollectiveTensor`,
    which costs the table its gradient where a compiled block takes it as it is (both torch 2.13).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"RowwiseEmbedding divides tables of embeddings, not a {type(module).__name__}.")
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=module.weight.requires_grad))
        kind = type(module)  # some scale what nn.Embedding returns
        module.__class__ = _RowLookup if kind is nn.Embedding else type(kind.__name__, (kind, _RowLookup), {})
        return module


class _RowLookup(nn.Embedding):
    """Has some rows of a table, of which the ranks of a mesh have one part each."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens that are the same on every rank."""
        assert isinstance(self.weight, DTensor)
        mesh, rows = self.weight.device_mesh, self.weight.to_local()
        first_row = mesh.get_local_rank() * -(-self.num_embeddings // mesh.size())
        positions = input - first_row
        is_elsewhere = (positions < 0) | (positions >= rows.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - first_row
        found = nn.functional.embedding(
            positions.masked_fill(is_elsewhere, 0),
            rows,
            padding_idx=padding if padding in range(rows.shape[0]) else None,
        ).masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)
        return add_up_parts(found, mesh, Replicate()).to_local()


class LocalComputation(ParallelStyle):
    """A layer that computes with plain tensors: with its parameters whole on every rank, or with this rank's part of
    its weight.

    Gradients of what all ranks have whole, a parameter or an input, are added up. Whole layers that compute for a
    rank's part of the tokens are as `SequenceParallel` has them, but not every operator knows DTensors, and products of
    several sequences' parts gather them (torch 2.13).

    Parameters
    ----------
    placement: Placement
        Of its parameters.
    """

    def __init__(self, placement: Placement = WHOLE) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            whole = module.get_parameter(name)
            divided = distribute_tensor(whole, device_mesh, [self.placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(divided, requires_grad=whole.requires_grad))
        kind = type(module)

        def forward(self: nn.Module, tokens: torch.Tensor) -> Any:
            own = {name: _take_local(getattr(self, name)) for name in names}
            return kind.forward(_OtherAttributes(self, own), _take_local(tokens))

        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
        return module


def _take_local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor. The gradient of what all have is the sum of theirs."""
    if not isinstance(tensor, DTensor):
        return tensor
    grad_placements = [Partial() if placement.is_replicate() else placement for placement in tensor.placements]
    return tensor.to_local(grad_placements=grad_placements)


class _OtherAttributes:
    """A module some of whose attributes are others."""

    def __init__(self, module: nn.Module, others: dict[str, Any]) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ColwiseConv1D(ColwiseParallel):
    """`ColwiseParallel` for transformers' Conv1D, a linear layer whose weight is the other way round."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _divide_module(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class RowwiseConv1D(RowwiseParallel):
    """`RowwiseParallel` for transformers' Conv1D."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return _divide_module(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()})


def _divide_module(
    style: ColwiseParallel | RowwiseParallel, module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]
) -> nn.Module:
    """Divide a module's own parameters, and have inputs and outputs prepared as the style says."""

    def divide_parameters(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            divided_parameter = distribute_tensor(
                parameter, mesh, [placements[name]], src_data_rank=style.src_data_rank
            )
            module.register_parameter(name, nn.Parameter(divided_parameter, requires_grad=parameter.requires_grad))

    return distribute_module(
        module,
        mesh,
        divide_parameters,
        partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts),
        partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
    )


def add_up_parts(part: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """The sum of what the ranks of a mesh have, or of it the part that a placement leaves to each."""
    partial_sums = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    return partial_sums.redistribute(placements=[placement])


def build_sequence_split(num_arguments: int) -> PrepareModuleInput:
    """The first of so many positional arguments is divided over the sequence, as it comes in whole."""
    other_layouts = (None,) * (num_arguments - 1)
    return PrepareModuleInput(
        input_layouts=(Replicate(), *other_layouts),
        desired_input_layouts=(SEQUENCE_SHARD, *other_layouts),
        use_local_output=True,
    )


def strip_checkpoint_wrappers(path: str) -> str:
    """A module's path as it is without the wrappers of checkpointing."""
    return path.replace(_CHECKPOINT_PREFIX, "")
