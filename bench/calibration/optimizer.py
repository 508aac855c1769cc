"""Optimizers' steps: every implementation the suite knows, on the gradients of a training step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bench.calibration.timer import CallTimer
from bench.prediction.cost.rank_speed import build_updates_key, count_optimizer_passes
from bench.training.engine import IMPLEMENTATIONS, OptimizerConfig

SCRATCH_BYTES = 2**26
"""Memory that is written before each step: in training, parameters and states were last used a whole step ago."""


class TimedOptimizers:
    """All optimizers over one model's parameters, in fp32."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        parameters = list(module.parameters())
        self._parameter_counts = len(parameters), sum(parameter.numel() for parameter in parameters)
        self._scratch = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        configs = [
            OptimizerConfig(name, implementation, learning_rate=1e-6)
            for name in ("adamw", "sgd")
            for implementation in IMPLEMENTATIONS
        ]
        self._optimizers = [(config, config.build(module.parameters())) for config in configs]

    def initialize_states(self) -> None:
        """Take a first step of each, which makes its states. The parameters have gradients."""
        for _, optimizer in self._optimizers:
            optimizer.step()

    def time_steps(self, timer: CallTimer) -> Iterator[tuple[str, tuple[int, int], float, float]]:
        """Take a step of each: its name, number of tensors and of elements, bytes, and seconds."""
        for config, optimizer in self._optimizers:
            self._scratch.add_(1)
            bytes_moved = 4.0 * self._parameter_counts[1] * count_optimizer_passes(config)
            yield build_updates_key(config), self._parameter_counts, bytes_moved, timer.time_calls([optimizer.step])
