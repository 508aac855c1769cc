"""Stochastic gradient descent, with momentum or without: torch's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.typed_config import Within
from bench.optimizers.base import IsHiddenMatrix, OptimizerConfig
from bench.optimizers.updated_tensor import UpdatedTensor

if TYPE_CHECKING:
    import torch

PASSES_WITHOUT_STATE, PASSES_PER_STATE = 3, 2
"""Reads and writes of a tensor of the parameters' size per step: parameter and gradient are read, the parameter is
written; a state is read and written."""


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    """No state, or with momentum one per parameter, in the parameter's format."""

    momentum: Annotated[float, Within(0, 1, exclusive_maximum=True)] = 0.0
    """Above 0 it keeps one state per parameter."""

    label = "SGD"
    updates_offloaded_parameters = True

    @property
    def states_per_parameter(self) -> float:
        return int(self.momentum > 0)

    def build(
        self, parameters: Iterable[Any], is_hidden_matrix: IsHiddenMatrix = lambda parameter: False
    ) -> torch.optim.Optimizer:
        import torch

        return torch.optim.SGD(
            parameters,
            lr=self.learning_rate,
            momentum=self.momentum,
            fused=self.implementation == "fused",
            foreach=self.implementation == "foreach",
        )

    def compute_state_bytes(self, tensor: UpdatedTensor, itemsize: int) -> float:
        return self.states_per_parameter * tensor.numel * itemsize

    def compute_temporary_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int, *, is_on_cpu: bool) -> float:
        return 0.0

    def compute_moved_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int) -> float:
        num_states = 0 if self.implementation == "fused" else self.states_per_parameter
        passes = PASSES_WITHOUT_STATE + PASSES_PER_STATE * num_states
        return passes * sum(tensor.numel for tensor in tensors) * itemsize
