"""How layers with adapters are divided among tensor-parallel ranks: as the layers alone, their adapters with them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from bench.finetune.adapters import ADAPTER_NAME_PARTS
from bench.models.division import LayerDivision, LocalComputation, add_up_parts

DOWN_NAME, UP_NAME = ADAPTER_NAME_PARTS


def divide_adapters(division: LayerDivision) -> LayerDivision:
    """A model's division, with that of the adapters which its layers have got."""
    fused_matrices = {
        name: dataclasses.replace(fused, dimension=0) if UP_NAME in name else fused
        for name, fused in division.fused_matrices.items()
        if DOWN_NAME not in name
    }
    styles = [(module, find_layer_style(module, style)) for module, style in division.parallel_styles]
    return dataclasses.replace(division, parallel_styles=styles, fused_matrices=fused_matrices)


def find_layer_style(layer: nn.Module, style: ParallelStyle) -> ParallelStyle:
    """The style that divides a layer with an adapter as `style` divides a layer without one; for others, itself."""
    kinds = (ColwiseParallel, RowwiseParallel, LocalComputation)
    return AdaptedLayerStyle(style) if hasattr(layer, "lora_A") and isinstance(style, kinds) else style


class AdaptedLayerStyle(ParallelStyle):
    """y = W x + alpha / r * B A x, of which W is divided as a style says.

    Where ranks have rows of W, they have the same rows of B and all of A; where they have columns of W, those of A and
    all of B, and W x is added up together with B A x. So nothing more is sent of hidden states than without adapters.
    What all ranks have whole gets its gradient as a sum over them.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer_style, down_style, up_style = copy.copy(self._style), LocalComputation(), LocalComputation()
        total: _SumOverRanks | None = None
        if isinstance(layer_style, ColwiseParallel):
            whole_input = PrepareModuleInput(
                input_layouts=layer_style.input_layouts, desired_input_layouts=(Replicate(),)
            )
            parallelize_module(module, device_mesh, whole_input, src_data_rank=self.src_data_rank)
            layer_style.input_layouts = (Replicate(),)
            up_style = LocalComputation(Shard(0))
        elif isinstance(layer_style, RowwiseParallel):
            (placement,) = layer_style.output_layouts
            total = _SumOverRanks(device_mesh, placement, layer_style.use_local_output)
            layer_style.output_layouts, layer_style.use_local_output = (Partial(),), False
            down_style = LocalComputation(Shard(1))
        layer: Any = module.base_layer
        styles = {layer: layer_style}
        styles |= dict.fromkeys(_list_adapters(module.lora_A), down_style)
        styles |= dict.fromkeys(_list_adapters(module.lora_B), up_style)
        for part, style in styles.items():
            parallelize_module(part, device_mesh, style, src_data_rank=self.src_data_rank)
        if total is not None:
            layer.register_forward_hook(_take_partial_sum)
            module.register_forward_hook(total)
        return module


def _list_adapters(adapters: Any) -> list[nn.Module]:
    """peft's ``lora_A`` or ``lora_B`` of a layer, by the adapters' names."""
    return list(adapters.values())


def _take_partial_sum(_layer: nn.Module, _inputs: Any, output: DTensor) -> torch.Tensor:
    """This rank's part of a sum, to which gradients come whole."""
    return output.to_local(grad_placements=[Replicate()])


@dataclasses.dataclass(frozen=True)
class _SumOverRanks:
    """A forward hook that adds up what ranks have of a layer's output."""

    mesh: DeviceMesh
    placement: Placement
    """Of the sum."""
    returns_local: bool

    def __call__(self, _layer: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        total = add_up_parts(output, self.mesh, self.placement)
        return total.to_local() if self.returns_local else total
