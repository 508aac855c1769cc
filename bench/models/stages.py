"""Stages: a model cut between its blocks into parts that run one after the other, each on devices of its own."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import nn


class Stage(nn.Module):
    """Some consecutive blocks of a model, with what lies before its first block and behind its last one.

    ``stage(*handed_over, **batch.inputs)`` takes what the stage before it hands over (the first one: nothing) and the
    inputs of the batch by name, and returns what it hands over itself; the last one returns the logits.
    """

    block_lists: Sequence[nn.ModuleList]
    """Its blocks, in the order they run."""

    @abstractmethod
    def forward(self, *handed_over: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Run the stage."""


def cut(num_blocks: int, stages: int) -> list[range]:
    """The blocks of each stage: numbers of blocks differ by one at most.

    Blocks that are left over go to the stages in the middle first, then to the first one and to the last one: these
    have the embeddings, and the head over the vocabulary with the loss.
    """
    each, left_over = divmod(num_blocks, stages)
    order = [*range(1, stages - 1), 0, stages - 1]
    counts = [each + (stage in order[:left_over]) for stage in range(stages)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def twin(module: nn.Module) -> nn.Module:
    """Another module over the same parameters: for parameters that several stages have, each in a module of its own."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
