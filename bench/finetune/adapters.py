"""Linear layers of a model's blocks, and adapters beside them, made on meta: peft's, or stand-ins without it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.finetune.base import is_installed
from bench.models import Family
from bench.models.checkpointing import shorten_family

if TYPE_CHECKING:
    import torch
    from torch import nn

ALL_LINEAR = "all-linear"
"""Every linear layer of the blocks; peft's word."""


@dataclass(frozen=True)
class AdapterSpec:
    """How a model is changed: hashable, as traces are remembered by it."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    bits: int | None = None
    """None: weights stay as they are."""
    double_quantisation: bool = True
    dropout: float = 0.0
    fp32_adapters: bool = False

    @property
    def uses_stand_ins(self) -> bool:
        """Whether a library is missing, so that the model can be traced, not run."""
        return not all(map(is_installed, ("peft",) if self.bits is None else ("peft", "bitsandbytes")))


# --- Linear layers of a model's blocks, and adapters beside them.

ADAPTER_NAME_PARTS = (".lora_A.", ".lora_B.")
"""In the names of their parameters."""

BASE_LAYER_SUFFIX = ".base_layer"
"""What peft adds to the name of a layer that it has wrapped."""


LAYERS_NOT_CALLED = ("dt_proj",)
"""Linear layers whose weight the model multiplies with by itself, so that nothing can stand beside them: Mamba's."""


@functools.cache
def find_linear_layers(family: Family) -> dict[str, tuple[tuple[int, int], ...]]:
    """Names of the linear layers within the blocks, in order, each with the shapes (in, out) that it has there."""
    model = (shorten_family(family, 2, family.block_period) or family).build_model()
    shapes_by_name: dict[str, tuple[tuple[int, int], ...]] = {}
    for _, name, layer in iterate_linear_layers(family, model):
        shapes_by_name[name] = tuple(dict.fromkeys((*shapes_by_name.get(name, ()), find_layer_dimensions(layer))))
    return shapes_by_name


def iterate_linear_layers(family: Family, model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every linear layer of the blocks: what it hangs in, its name there, and itself."""
    for blocks in family.find_block_lists(model):
        for parent in list(blocks.modules()):
            for name, child in list(parent.named_children()):
                if is_linear(child) and name not in LAYERS_NOT_CALLED:
                    yield parent, name, child


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer: torch's, or transformers' `Conv1D`, whose weight lies the other way round.

    Some routers are derived from torch's, but return more than a product.
    """
    from torch import nn

    return (isinstance(module, nn.Linear) and "Router" not in type(module).__name__) or is_transposed(module)


def is_quantised(module: nn.Module) -> bool:
    """Whether this is a layer that `bench.finetune.quantised` has made."""
    return hasattr(module, "drawn_shape")


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight is (in, out)."""
    return type(module).__name__ == "Conv1D"


def find_layer_dimensions(layer: nn.Module) -> tuple[int, int]:
    """Width of a linear layer's input and output."""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (rows, columns) if is_transposed(layer) else (columns, rows)


def add_adapters(family: Family, model: nn.Module, adapter_spec: AdapterSpec) -> None:
    """Put adapters beside the layers of the blocks that are named, and freeze everything else. The model stays on
    meta."""
    import torch

    from bench.finetune.stand_ins import AdaptedLinear

    targets = [
        (parent, name, layer)
        for parent, name, layer in iterate_linear_layers(family, model)
        if adapter_spec.target_modules == (ALL_LINEAR,) or name in adapter_spec.target_modules
    ]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if adapter_spec.uses_stand_ins:
        for parent, name, layer in targets:
            shape = find_layer_dimensions(layer)
            adapted_layer = AdaptedLinear(layer, *shape, adapter_spec.rank, adapter_spec.alpha, adapter_spec.dropout)
            setattr(parent, name, adapted_layer)
        return
    from peft import LoraConfig, inject_adapter_in_model

    target_ids = {id(layer) for _, _, layer in targets}
    for blocks in family.find_block_lists(model):
        config = LoraConfig(
            r=adapter_spec.rank,
            lora_alpha=adapter_spec.alpha,  # type: ignore[arg-type]
            lora_dropout=adapter_spec.dropout,
            target_modules=[name for name, module in blocks.named_modules() if id(module) in target_ids],
            fan_in_fan_out=any(is_transposed(layer) for _, _, layer in targets),
        )
        # Of the blocks alone: layers outside may be called the same, and of a model that peft knows by its name it
        # takes the names of linear layers beside experts for those of the experts.
        blocks.is_loaded_in_4bit = adapter_spec.bits == 4  # type: ignore[assignment]
        blocks.is_loaded_in_8bit = adapter_spec.bits == 8  # type: ignore[assignment]
        with torch.device("meta"):
            inject_adapter_in_model(config, blocks, low_cpu_mem_usage=True)


def list_adapter_layers(model: nn.Module) -> list[nn.Module]:
    """The two narrow layers of every adapter."""
    from torch import nn

    return [
        module
        for name, module in model.named_modules()
        if any(part in f"{name}." for part in ADAPTER_NAME_PARTS) and isinstance(module, nn.Linear)
    ]


def find_adapter_init_std(name: str, parameter: torch.Tensor) -> float | None:
    """Standard deviation of an adapter's parameter: of A as of a linear layer in torch, B starts as zeros.

    That is how LoRA starts (section 4.1), so that adapters change nothing at first; peft draws A from a uniform
    distribution of the same variance.
    """
    return 0.0 if ".lora_B." in name else float((3 * parameter.shape[1]) ** -0.5)
