"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235): torch's, whose second moments of matrices are factored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.typed_config import OneOf
from bench.optimizers.base import STEP_COUNTER_BYTES, IsHiddenMatrix, OptimizerConfig
from bench.optimizers.updated_tensor import FLAT_TENSORS, PARTS, WHOLE_TENSORS, UpdatedTensor

if TYPE_CHECKING:
    import torch

PASSES = 14
"""Reads and writes of a tensor of the parameters' size per step (torch/optim/_adafactor.py of torch 2.13): the
parameter's norm 1; the gradient's norms along both dimensions 2; the estimate of the second moment is written by a
product of two vectors 1, divided 2, clamped 2, its root taken 2, times the gradient 3; the update's norm 1; the
parameter is updated in place 3, less what is left of the last product. foreach scales all updates before 2."""

FOREACH_PASSES = 2

KERNELS_PER_TENSOR = 22
"""Of a matrix with for_loop, counted in that file."""


@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """A row and a column of second moments per matrix, in the parameter's format; of vectors the whole second moment.

    torch's has no first moment. An update is divided by its root mean square over the whole tensor where that is above
    1, and scaled by the parameter's. Whoever has a part of a tensor takes both over the part: with flat tensors (FSDP1,
    DeepSpeed) nothing is factored, with parts of layers (tensor parallelism without FSDP) each rank factors its own, so
    losses are not those of one process.
    """

    implementation: Annotated[str, OneOf("foreach", "for_loop")]
    """foreach (one kernel per operation) or for_loop (one kernel per operation and parameter, torch's default)."""

    label = "Adafactor"
    supported_tensors = (WHOLE_TENSORS, PARTS, FLAT_TENSORS)
    unsupported_reason = (
        "torch 2.13's Adafactor squares norms in place, which DTensors refuse where the norm is still spread over the "
        "ranks. Choose strategy ddp, zero1 or fsdp1, or optimizer=adamw"
    )
    updates_like_one_process = (WHOLE_TENSORS,)

    @property
    def states_per_parameter(self) -> float:
        return 0

    def build(
        self, parameters: Iterable[Any], is_hidden_matrix: IsHiddenMatrix = lambda parameter: False
    ) -> torch.optim.Optimizer:
        import torch

        return torch.optim.Adafactor(parameters, lr=self.learning_rate, foreach=self.implementation == "foreach")

    def compute_state_bytes(self, tensor: UpdatedTensor, itemsize: int) -> float:
        """Of shape (..., n, m): (..., n, 1) and (..., 1, m); of a vector as many as it has elements; and the counter
        of steps."""
        return _count_moments(tensor) * itemsize + STEP_COUNTER_BYTES

    def compute_temporary_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int, *, is_on_cpu: bool) -> float:
        """foreach: the updates of all tensors at once. for_loop: a matrix's update, or a vector's and its gradient's
        squares, while the variables `update` and `var_estimate` still have the update of the tensor before."""
        if self.implementation == "foreach":
            return sum(tensor.numel for tensor in tensors) * itemsize
        peak = held = squares = means = 0
        for tensor in tensors:
            if len(tensor.shape) > 1:
                means = _count_moments(tensor)
            else:
                squares = tensor.numel
            peak = max(peak, held + tensor.numel + squares + means)
            held = tensor.numel
        return peak * itemsize

    def compute_moved_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int) -> float:
        passes = PASSES + (FOREACH_PASSES if self.implementation == "foreach" else 0)
        return passes * sum(tensor.numel for tensor in tensors) * itemsize

    def count_kernels(self, tensors: Sequence[UpdatedTensor]) -> int:
        """Norms are taken tensor by tensor with foreach, too: 5 of the kernels."""
        per_tensor = KERNELS_PER_TENSOR if self.implementation == "for_loop" else 7
        return max(1, per_tensor * len(tensors))


def _count_moments(tensor: UpdatedTensor) -> int:
    if len(tensor.shape) < 2 or not tensor.numel:
        return tensor.numel
    return tensor.numel // tensor.shape[-1] + tensor.numel // tensor.shape[-2]
