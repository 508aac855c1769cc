"""What is done to a model's blocks before a strategy wraps them: grouping and compiling."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from bench.models.base import Family
from bench.models.experts import CompiledAlone


def compile_blocks(
    family: Family, model: nn.Module, *, are_divided: bool = False, graph_breaks: Collection[nn.Module] = ()
) -> None:
    """Compile each block in place, after it was checkpointed and before it is wrapped.

    Parameters
    ----------
    are_divided: bool
        Ranks share layers. torch's DDPOptimizer, which cuts a graph where a bucket of gradients ends, would hand plain
        tensors from part to part where the next one has DTensors (torch 2.13): then DDP reduces a block's gradients
        when all of its backward is done. AOTAutograd's cache on disk knows a graph by the shape of its DTensors' mesh
        and not by the names of the mesh's process groups, which the graph has, and which other layouts have not: it is
        not used.
    graph_breaks: collection of modules
        See `list_compiled_parts`.
    """
    if are_divided:
        from torch._functorch import config as autograd_config  # brings the compiler along

        torch._dynamo.config.optimize_ddp = False
        autograd_config.enable_autograd_cache = False
    for blocks in family.find_block_lists(model):
        for block in blocks:
            for part in list_compiled_parts(block, graph_breaks):
                # Of parts of one class and several sizes torch would else make a graph for sizes that are not known:
                # of those without parameters sizes may change from step to step.
                part.compile(dynamic=None if part is block or isinstance(part, CompiledAlone) else False)


def list_compiled_parts(block: nn.Module, graph_breaks: Collection[nn.Module]) -> list[nn.Module]:
    """What is compiled of a block: the block, or its largest parts that have no module of `graph_breaks`, at which
    torch's compiler would break the block's graph. Parts without parameters are left out unless they are
    `CompiledAlone`."""
    if graph_breaks and any(module in graph_breaks for module in block.modules()):
        return [part for child in block.children() for part in list_compiled_parts(child, graph_breaks)]
    return [block] if isinstance(block, CompiledAlone) or any(True for _ in block.parameters()) else []


class BlockGroup(nn.Module):
    """Several consecutive blocks that are called as one."""

    def __init__(self, family: Family, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.family = family
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks in turn, with the call the model makes for one block."""
        return self.family.run_blocks(list(self.blocks), *args, **kwargs)


def find_trained_layers(family: Family, model: nn.Module) -> list[nn.Module]:
    """Where other parameters are frozen, the layers of the blocks that are trained; none where everything is."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return []
    modules = (module for blocks in family.find_block_lists(model) for module in blocks.modules())
    return [
        module for module in modules if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def group_blocks(family: Family, model: nn.Module, blocks_per_unit: int) -> list[nn.Module]:
    """Put every `blocks_per_unit` consecutive blocks into one `BlockGroup`, and return the units in running order.

    With one block per unit the model stays as it is. Groups never span two block lists (encoder and decoder).
    """
    units: list[nn.Module] = []
    for blocks in family.find_block_lists(model):
        if blocks_per_unit > 1:
            all_blocks = list(blocks)
            groups = [
                BlockGroup(family, all_blocks[start : start + blocks_per_unit])
                for start in range(0, len(all_blocks), blocks_per_unit)
            ]
            del blocks[:]
            blocks.extend(groups)
        units.extend(blocks)
    return units
