"""Optimizers' steps: every implementation the suite knows, on the gradients of a training step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bench.calibration.timer import Timer
from bench.simulate.pace import optimizer_passes, updates_key
from bench.training.optimizer import IMPLEMENTATIONS, OptimizerConfig

SCRATCH_BYTES = 2**26
"""Memory that is written before each step: in training, parameters and states were last used a whole step ago."""


class Optimizers:
    """All optimizers over one model's parameters, in fp32."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        parameters = list(module.parameters())
        self._size = len(parameters), sum(parameter.numel() for parameter in parameters)
        self._scratch = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        configs = [
            OptimizerConfig(name, implementation, learning_rate=1e-6)
            for name in ("adamw", "sgd")
            for implementation in IMPLEMENTATIONS
        ]
        self._all = [(config, config.build(module.parameters())) for config in configs]

    def prepare(self) -> None:
        """Take a first step of each, which makes its states. The parameters have gradients."""
        for _, optimizer in self._all:
            optimizer.step()

    def timed(self, timer: Timer) -> Iterator[tuple[str, tuple[int, int], float, float]]:
        """Take a step of each: its name, number of tensors and of elements, bytes, and seconds."""
        for config, optimizer in self._all:
            self._scratch.add_(1)
            passed = 4.0 * self._size[1] * optimizer_passes(config)
            yield updates_key(config), self._size, passed, timer.stretch([optimizer.step])
