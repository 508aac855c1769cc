"""Optimizers, from torch alone, built after sharding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from bench.core.errors import invalid_value_error
from bench.core.typed_config import OneOf, Within

IMPLEMENTATIONS = ("fused", "foreach", "for_loop")


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and which of torch's implementations of it."""

    name: Annotated[str, OneOf("adamw", "sgd")]
    """adamw (two states per parameter) or sgd (none without momentum)."""
    implementation: Annotated[str, OneOf(*IMPLEMENTATIONS)]
    """fused (one kernel), foreach (one kernel per operation) or for_loop (one kernel per operation and parameter)."""
    learning_rate: Annotated[float, Within(0, 1e38, exclusive_minimum=True)]
    momentum: Annotated[float, Within(0, 1, exclusive_maximum=True)] = 0.0
    """Of SGD: above 0 it keeps one state per parameter."""
    keep_gradients: bool = False
    """Fill gradients with zeros between steps (torch's default before 2.0) instead of freeing them."""

    def __post_init__(self) -> None:
        if self.momentum and self.name != "sgd":
            raise invalid_value_error(
                "optimizer.momentum", self.momentum, f"0, since optimizer.name={self.name} has its own"
            )

    @property
    def states_per_parameter(self) -> int:
        """Tensors of a parameter's size the optimizer keeps."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over parameters as they are now: shards, if they are sharded."""
        options: dict[str, Any] = {
            "lr": self.learning_rate,
            "fused": self.implementation == "fused",
            "foreach": self.implementation == "foreach",
        }
        if self.name == "sgd":
            return torch.optim.SGD(parameters, momentum=self.momentum, **options)
        return torch.optim.AdamW(parameters, **options)
