"""What becomes of a loss, and how parameters are updated: plain PyTorch's way, which frameworks replace."""

from __future__ import annotations

import torch


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

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of a micro-batch's share of the loss."""
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        """One step of the optimizer, after which no gradients are left (or zeros)."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self._keep_gradients)
