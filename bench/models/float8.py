"""FP8: matrix products of the blocks in 8 bits, forward and backward, by torchao.

Parameters, activations and gradients stay as they are; the operands of each product are scaled and rounded for it: the
weights and inputs to e4m3, gradients to e5m2 (tensorwise) or e4m3 (rowwise). Converted are the linear layers within
blocks whose sizes are multiples of 16, which the hardware asks for; never head and embedding, which lose most by it and
which torchao's own recipes leave out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bench.core.errors import ImpossibleError
from bench.core.installation import format_install_command
from bench.core.precision import Precision
from bench.models.base import Family

SIZE_MULTIPLE = 16
"""Of which ``torch._scaled_mm`` wants both sizes of a weight to be."""


def require_torchao(precision: Precision) -> None:
    """Raise `ImpossibleError` where torchao, which only FP8 needs, is missing."""
    if importlib.util.find_spec("torchao") is None:
        raise ImpossibleError(
            f"precision={precision.name} needs torchao, which is not installed: choose bf16, or install the extra fp8 "
            f"({format_install_command('fp8')})."
        )


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
