"""What becomes of a loss, and how parameters are updated: plain PyTorch's way, which frameworks replace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from bench.models import Batch

if TYPE_CHECKING:
    import torch

TimeSpans = list[tuple[float, float]]
"""Beginnings and ends, in seconds."""


class StepEngine(Protocol):
    """A model that is ready to be trained, as far as who carries out a step must know it."""

    @property
    def enter_phase(self) -> Callable[[str], None]:
        """Told which part of the step begins."""

    @property
    def loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Of logits and labels."""

    def run_micro_batches(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """A step that runs forward and backward of each micro-batch in turn; their mean loss."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Around what computes narrower than parameters are stored."""


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
        self.clip_gradients: Callable[[], None] | None = None
        """Called before the optimizer's step, when gradients are no longer scaled."""

    def step(self, engine: StepEngine, micro_batches: Sequence[Batch]) -> torch.Tensor | None:
        """One optimizer step: forward and backward of one micro-batch after the other, then the update.

        Returns
        -------
        torch.Tensor or None
            Their mean loss; None on a rank that does not know it.
        """
        return engine.run_micro_batches(micro_batches)

    def start_timed_steps(self) -> None:
        """Note, from now on, when this rank computes.

        Only strategies whose ranks wait for each other within a step take note of it.
        """

    def collect_busy_spans(self) -> list[TimeSpans] | None:
        """When it computed in each timed step, counted from the first one's beginning; None if nobody noted."""
        return None

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of a micro-batch's share of the loss."""
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        """One step of the optimizer, after which no gradients are left (or zeros)."""
        if self.clip_gradients is not None:
            self.scaler.unscale_(self.optimizer)
            self.clip_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self._keep_gradients)
