"""FP8: matrix products of the blocks in 8 bits, forward and backward, by torchao.

Parameters, activations and gradients stay as they are; the operands of each product are scaled and rounded for it: the
weights and inputs to e4m3, gradients to e5m2 (tensorwise) or e4m3 (rowwise). Converted are the linear layers within
blocks whose sizes are multiples of 16, which the hardware asks for; never head and embedding, which lose most by it and
which torchao's own recipes leave out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from bench.core.errors import ImpossibleError
from bench.core.precision import Precision
from bench.models.base import Family
from bench.models.division import LayerDivision

SIZE_MULTIPLE = 16
"""Of which ``torch._scaled_mm`` wants both sizes of a weight to be."""


def convert_to_float8(family: Family, model: nn.Module, precision: Precision) -> None:
    """Have the linear layers of the blocks compute in FP8, in place; before names are taken of the parameters.

    Raises
    ------
    ImpossibleError
        If there is none of sizes that FP8 takes.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(precision.float8)
    if precision.float8_emulated:
        object.__setattr__(config, "emulate", True)
    num_converted = 0
    for blocks in family.find_block_lists(model):
        for block in blocks:
            convert_to_float8_training(
                block, config=config, module_filter_fn=lambda module, _: can_convert_linear(module)
            )
            num_converted += sum(type(module).__name__ == "Float8Linear" for module in block.modules())
            num_converted += _convert_conv1d_layers(block, config)
    if not num_converted:
        raise ImpossibleError(
            f"precision={precision.name} is not valid for model={family.name}, no linear layer of whose blocks has "
            f"sizes that are multiples of {SIZE_MULTIPLE}: choose bf16, or another model."
        )


def can_convert_linear(module: nn.Module) -> bool:
    """Whether the sizes of a linear layer are such that FP8 takes it."""
    return isinstance(module, nn.Linear) and all(size % SIZE_MULTIPLE == 0 for size in module.weight.shape)


def exchange_in_float8(division: LayerDivision) -> None:
    """Have layers that compute in FP8 and divide hidden states over the sequence exchange them in FP8.

    Hidden states are scaled and rounded before they are gathered for a product, and so are gradients behind one, as
    ``torchao.float8.float8_tensor_parallel`` does it. It knows one scale per tensor; layers with others are left.
    """
    float8_layers = {module for module, _ in division.parallel_styles if _is_scaled_by_tensor(module)}
    if not float8_layers:
        return
    from torchao.float8 import float8_tensor_parallel as torchao_parallel

    if dist.get_backend() == dist.Backend.GLOO:
        _gather_bytes_on_cpus()
    functions_of_style: dict[type[ParallelStyle], Any] = {
        ColwiseParallel: torchao_parallel.Float8ColwiseParallel,
        RowwiseParallel: torchao_parallel.Float8RowwiseParallel,
    }
    for index, (module, style) in enumerate(division.parallel_styles):
        if module in float8_layers:
            # Those of transposed layers divide parameters in another way, and prepare inputs and outputs in the same.
            for functions in (functions for kind, functions in functions_of_style.items() if isinstance(style, kind)):
                vars(style).update(
                    _prepare_input_fn=functions._prepare_input_fn, _prepare_output_fn=functions._prepare_output_fn
                )
        elif type(style) is PrepareModuleInput and _gathers_for(module, style, float8_layers):
            gather = torchao_parallel.PrepareFloat8ModuleInput(
                input_layouts=style.input_layouts,
                desired_input_layouts=style.desired_input_layouts,
                input_kwarg_layouts=style.input_kwarg_layouts or None,
                desired_input_kwarg_layouts=style.desired_input_kwarg_layouts or None,
                use_local_output=style.use_local_output,
            )
            division.parallel_styles[index] = (module, gather)


@functools.cache
def _gather_bytes_on_cpus() -> torch.library.Library:
    """Register `all_gather_as_bytes`, for gloo refuses tensors in FP8 (torch 2.13)."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", all_gather_as_bytes, "CPU")
    return library


def all_gather_as_bytes(tensor: torch.Tensor, group_size: int, group: Any) -> torch.Tensor:
    """``_c10d_functional.all_gather_into_tensor``, which sends what is in FP8 as bytes; not waited for."""
    gathered = tensor.new_empty((tensor.shape[0] * group_size, *tensor.shape[1:]))
    dtype = torch.uint8 if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 else tensor.dtype
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out
    gather(tensor.view(dtype), group_size, group, out=gathered.view(dtype))
    return gathered


def _is_scaled_by_tensor(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    if not hasattr(module, "linear_mm_config"):
        return False
    casts = (config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output)
    return all(cast.scaling_granularity.value == "tensorwise" for cast in casts)


def _gathers_for(module: nn.Module, style: PrepareModuleInput, float8_layers: set[nn.Module]) -> bool:
    """Whether what a style gathers goes to these layers and to no other product."""
    layouts = [*(style.input_layouts or ()), *style.input_kwarg_layouts.values()]
    is_gathered = [layout is not None and layout.is_shard() for layout in layouts]
    linear_layers = [child for child in module.modules() if isinstance(child, nn.Linear)]
    return any(is_gathered) and bool(linear_layers) and all(layer in float8_layers for layer in linear_layers)


def _convert_conv1d_layers(block: nn.Module, config: Any) -> int:
    """Replace GPT-2's linear layers, which transformers writes with transposed weights; returns how many."""
    from transformers.pytorch_utils import Conv1D

    modules: list[nn.Module] = list(block.modules())
    conv_layers = [
        (parent, name, child)
        for parent in modules
        for name, child in parent.named_children()
        if isinstance(child, Conv1D) and all(size % SIZE_MULTIPLE == 0 for size in child.weight.shape)
    ]
    for parent, name, child in conv_layers:
        setattr(parent, name, _build_float8_conv1d_class()(child, config))
    return len(conv_layers)


@functools.cache
def _build_float8_conv1d_class() -> Any:
    """Made when it is first needed, for torchao may not be there."""
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    class Float8Conv1D(Float8Linear):  # type: ignore[misc]
        """torchao's layer over a weight of shape (inputs, outputs)."""

        def __init__(self, layer: Any, config: Any) -> None:
            inputs, outputs = layer.weight.shape
            super().__init__(inputs, outputs, bias=False, config=config, device="meta")
            self.weight, self.bias = layer.weight, layer.bias

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            """As `Float8Linear.forward`, without transposing."""
            if torch.is_autocast_enabled():
                input = input.to(torch.get_autocast_dtype("cuda"))
            output = matmul_with_hp_or_float8_args.apply(input, self.weight, self.linear_mm_config, self.config)
            return output + self.bias.to(output.dtype)

    return Float8Conv1D


@contextlib.contextmanager
def enable_cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Have torchao, which asks CUDA's autocast alone, find it on: for traces on a machine without GPU."""
    previous_state = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", previous_state[0])
        torch.set_autocast_dtype("cuda", previous_state[1])
