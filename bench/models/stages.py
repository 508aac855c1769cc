"""Stages: a model cut between its blocks into parts that run one after the other, each on devices of its own."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import nn


class PipelineStageModule(nn.Module):
    """Some consecutive blocks of a model, with what lies before its first block and behind its last one.

    ``stage(*stage_inputs, **batch.inputs)`` takes what the stage before it hands over (the first one: nothing) and the
    inputs of the batch by name, and returns what it hands over itself; the last one returns the logits.
    """

    block_lists: Sequence[nn.ModuleList]
    """Its blocks, in the order they run."""

    @abstractmethod
    def forward(self, *stage_inputs: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Run the stage."""


def split_blocks_into_stages(num_blocks: int, num_stages: int) -> list[range]:
    """The blocks of each stage: numbers of blocks differ by one at most.

    Blocks that are left over go to the stages in the middle first, then to the first one and to the last one: these
    have the embeddings, and the head over the vocabulary with the loss.
    """
    blocks_per_stage, num_left_over = divmod(num_blocks, num_stages)
    stages_by_load = [*range(1, num_stages - 1), 0, num_stages - 1]
    block_counts = [blocks_per_stage + (stage in stages_by_load[:num_left_over]) for stage in range(num_stages)]
    starts = [sum(block_counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, block_counts, strict=True)]


def copy_sharing_parameters(module: nn.Module) -> nn.Module:
    """Another module over the same parameters: for parameters that several stages have, each in a module of its own."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
