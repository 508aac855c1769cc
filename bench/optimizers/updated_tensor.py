"""What one rank's optimizer updates: a tensor's shape there, and what it is a part of."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

WHOLE_TENSORS, PARTS, DTENSORS, DIVIDED_DTENSORS, FLAT_TENSORS = (
    "whole",
    "each rank's parts of them",
    "DTensors",
    "DTensors of divided layers",
    "flat",
)
"""What the parameters are that a strategy hands its optimizer: as the model has them; one rank's part of each, as a
plain tensor; DTensors, of which each rank stores some rows; the same of layers that tensor parallelism has divided;
of one dimension, a part of a tensor in which parameters lie one behind the other."""


@dataclass(frozen=True)
class UpdatedTensor:
    """A tensor that one rank's optimizer updates."""

    shape: tuple[int, ...]
    """On this rank."""
    is_hidden_matrix: bool = False
    """It is the weight of a layer within a block, with two dimensions."""
    num_shards: int = 1
    """Ranks that share it as a DTensor, divided along its first dimension."""
    num_rows: int | None = None
    """Of the whole DTensor; None where `shape` is whole."""

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.num_rows is None else (self.num_rows, *self.shape[1:])


def find_hidden_matrices(block_lists: Iterable[Iterable[nn.Module]]) -> list[nn.Parameter]:
    """Parameters of two dimensions within the blocks, but for embeddings such as T5's of relative positions."""
    from torch import nn

    return [
        parameter
        for blocks in block_lists
        for block in blocks
        for module in block.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    ]
