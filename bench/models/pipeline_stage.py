"""A stage: a model cut between its blocks into parts that run one after the other, each on devices of its own."""

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


def copy_sharing_parameters(module: nn.Module) -> nn.Module:
    """Another module over the same parameters: for parameters that several stages have, each in a module of its own."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
