"""What is done to a model's blocks before a strategy wraps them: grouping, checkpointing, compiling."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.models.base import Family

CHECKPOINTING_MODES = ("none", "full", "selective")


def checkpoint_blocks(family: Family, model: nn.Module, mode: str) -> None:
    """Wrap each block so that backward computes its activations again.

    ``full`` keeps a block's inputs alone. ``selective`` keeps the results of matrix products with weights and
    computes the rest again, attention scores among it: what "Reducing Activation Recomputation in Large
    Transformer Models" (Korthikanti et al. 2022, arXiv:2205.05198) calls selective activation recomputation.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {
        "checkpoint_impl": CheckpointImpl.NO_REENTRANT,
        "preserve_rng_state": _has_dropout(model),
    }
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _choose_checkpoint_policy)
    for blocks in family.find_block_lists(model):
        for index, block in enumerate(blocks):
            blocks[index] = checkpoint_wrapper(block, **options)


def compile_blocks(family: Family, model: nn.Module) -> None:
    """Compile each block in place, after it was checkpointed and before it is wrapped."""
    for blocks in family.find_block_lists(model):
        for block in blocks:
            block.compile()


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


def _choose_checkpoint_policy(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matmul_operators = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in matmul_operators else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
