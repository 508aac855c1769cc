"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class OptimizerPair(torch.optim.Optimizer):
    """Optimizers over different parameters, stepped one after the other, as one over all of them.

    Its groups of parameters are those it is given, as `ZeroRedundancyOptimizer` expects of an optimizer.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([{"params": list(group["params"])} for group in groups], {})
        self.optimizers = optimizers

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()
            self.state.update(optimizer.state)
