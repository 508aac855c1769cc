"""Linear layers of a model's blocks, and adapters beside them: peft's, made on meta."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from bench.finetune.shape import ALL_LINEAR, Shape
from bench.models import Family

ADAPTERS = (".lora_A.", ".lora_B.")
"""In the names of their parameters."""

BASE = ".base_layer"
"""What peft adds to the name of a layer that it has wrapped."""


@functools.cache
def linear_layers(family: Family) -> dict[str, tuple[tuple[int, int], ...]]:
    """Names of the linear layers within the blocks, in order, each with the shapes (in, out) that it has there."""
    model = (family.shortened(2) or family).build()
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for _, name, layer in inside_blocks(family, model):
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), dimensions(layer))))
    return found


def inside_blocks(family: Family, model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every linear layer of the blocks: what it hangs in, its name there, and itself."""
    for blocks in family.block_lists(model):
        for parent in list(blocks.modules()):
            for name, child in list(parent.named_children()):
                if is_linear(child):
                    yield parent, name, child


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer: torch's, or transformers' `Conv1D`, whose weight lies the other way round."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is (in, out)."""
    return type(module).__name__ == "Conv1D"


def dimensions(layer: nn.Module) -> tuple[int, int]:
    """Width of a linear layer's input and output."""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (rows, columns) if is_transposed(layer) else (columns, rows)


def add_adapters(family: Family, model: nn.Module, shape: Shape) -> None:
    """Put adapters beside the layers that are named, and freeze everything else. The model stays on meta."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = {name: layer for _, name, layer in inside_blocks(family, model)}
    names = list(layers) if shape.target_modules == (ALL_LINEAR,) else list(shape.target_modules)
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,  # type: ignore[arg-type]
        target_modules=names,
        fan_in_fan_out=any(is_transposed(layers[name]) for name in names),
    )
    with torch.device("meta"):
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)


def initial_std(name: str, parameter: torch.Tensor) -> float | None:
    """Standard deviation of an adapter's parameter: of A as of a linear layer in torch, B starts as zeros.

    That is how LoRA starts (section 4.1), so that adapters change nothing at first; peft draws A from a uniform
    distribution of the same variance.
    """
    return 0.0 if ".lora_B." in name else float((3 * parameter.shape[1]) ** -0.5)
