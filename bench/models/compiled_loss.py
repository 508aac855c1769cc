"""The loss as torch.compile makes it: logits are read as the model returns them, and never converted to fp32 in memory.

The compiler computes the softmax's maximum and sum while it reads the logits, and their gradients in one pass; what is
kept from forward to backward are the logits and two numbers per prediction. Fused kernels of libraries
(flash-attn's, TransformerEngine's) do alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class LossModule(nn.Module):
    """A loss of logits and labels as a module, which torch compiles in place."""

    def __init__(self, compute_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._compute_loss = compute_loss

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._compute_loss(logits, labels)


def compile_loss(compute_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> LossModule:
    """The same loss, compiled at its first call for the shapes of that call."""
    module = LossModule(compute_loss)
    module.compile(dynamic=False)
    return module
