"""What becomes of a loss, and how parameters are updated: plain PyTorch's way, which frameworks replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from bench.models import Batch

if TYPE_CHECKING:
    from bench.training.engine import Engine

Spans = list[tuple[float, float]]
"""Beginnings and ends, in seconds."""


class Stepper:
    """Backward and optimizer of one rank.

    Parameters
    ----------
    scaler: torch.amp.GradScaler
        Disabled where losses need no scaling.
    keep_gradients: bool
        Fill gradients with zeros after a step instead of freeing them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self._keep_gradients = keep_gradients

    def step(self, engine: Engine, micro_batches: Sequence[Batch]) -> torch.Tensor | None:
        """One optimizer step: forward and backward of one micro-batch after the other, then the update.

        Returns
        -------
        torch.Tensor or None
            Their mean loss; None on a rank that does not know it.
        """
        return engine.one_by_one(micro_batches)

    def busy(self, steps: int) -> list[Spans] | None:
        """When this rank computed in each of the last steps, from the first one's beginning on; None if nobody noted.

        Only strategies whose ranks wait for each other within a step take note of it.
        """
        return None

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of a micro-batch's share of the loss."""
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        """One step of the optimizer, after which no gradients are left (or zeros)."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self._keep_gradients)
