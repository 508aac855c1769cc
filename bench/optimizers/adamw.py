"""AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101): torch's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.errors import invalid_value_error
from bench.core.typed_config import Within
from bench.optimizers.base import STEP_COUNTER_BYTES, IsHiddenMatrix, OptimizerConfig
from bench.optimizers.updated_tensor import UpdatedTensor

if TYPE_CHECKING:
    import torch

PASSES = {"fused": 7, "foreach": 24, "for_loop": 24}
"""Reads and writes of a tensor of the parameters' size per step: parameter, gradient and two states are read, all but
the gradient written; one operation at a time makes 10 passes, each with operands and result."""


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    """Two states per parameter, in the parameter's format: bf16 with precision=bf16_pure."""

    momentum: Annotated[float, Within(0, 1, exclusive_maximum=True)] = 0.0
    """0: AdamW has moments of its own."""

    label = "AdamW"
    updates_offloaded_parameters = True

    def __post_init__(self) -> None:
        if self.momentum:
            raise invalid_value_error(
                "optimizer.momentum", self.momentum, f"0, since optimizer.name={self.name} has its own"
            )

    @property
    def states_per_parameter(self) -> float:
        return 2

    def build(
        self, parameters: Iterable[Any], is_hidden_matrix: IsHiddenMatrix = lambda parameter: False
    ) -> torch.optim.Optimizer:
        return build_torch_adamw(parameters, self.learning_rate, self.implementation)

    def compute_state_bytes(self, tensor: UpdatedTensor, itemsize: int) -> float:
        return compute_adamw_state_bytes(tensor, itemsize)

    def compute_temporary_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int, *, is_on_cpu: bool) -> float:
        return compute_adamw_temporary_bytes(tensors, itemsize, self.implementation)

    def compute_moved_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int) -> float:
        return PASSES[self.implementation] * sum(tensor.numel for tensor in tensors) * itemsize


def build_torch_adamw(parameters: Iterable[Any], learning_rate: float, implementation: str) -> torch.optim.AdamW:
    import torch

    return torch.optim.AdamW(
        parameters, lr=learning_rate, fused=implementation == "fused", foreach=implementation == "foreach"
    )


def compute_adamw_state_bytes(tensor: UpdatedTensor, itemsize: int) -> float:
    """Of both moments, and of the counter of steps."""
    return 2 * tensor.numel * itemsize + STEP_COUNTER_BYTES


def compute_adamw_temporary_bytes(tensors: Sequence[UpdatedTensor], itemsize: int, implementation: str) -> float:
    """foreach: the square roots of all second moments at once. for_loop: a square root and its quotient; until that is
    there its variable, `denom` in torch/optim/adam.py of torch 2.13, has the quotient of the tensor before."""
    numels = [tensor.numel for tensor in tensors]
    if implementation == "foreach":
        return sum(numels) * itemsize
    if implementation == "for_loop":
        return max((before + 2 * numel for before, numel in pairwise((0, *numels))), default=0) * itemsize
    return 0.0
