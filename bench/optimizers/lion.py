"""Lion (Chen et al. 2023, arXiv:2302.06675): bitsandbytes', with its momentum in fp32."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.typed_config import OneOf
from bench.optimizers.base import FP32_BYTES, IsHiddenMatrix, OptimizerConfig
from bench.optimizers.updated_tensor import FLAT_TENSORS, PARTS, WHOLE_TENSORS, UpdatedTensor

if TYPE_CHECKING:
    import torch

BITSANDBYTES_UNSUPPORTED_REASON = (
    "bitsandbytes 0.50's kernels are not made for DTensors. Choose strategy ddp, zero1 or fsdp1, or optimizer=adamw"
)


@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """One state per parameter, in fp32 whatever the parameter's format: bitsandbytes has it in fp32 or 8 bits.

    Every element is updated by itself, so shards become what one process would make of them.
    """

    implementation: Annotated[str, OneOf("bitsandbytes")]
    """bitsandbytes: a kernel per parameter."""

    label = "Lion"
    supported_tensors = (WHOLE_TENSORS, PARTS, FLAT_TENSORS)
    unsupported_reason = BITSANDBYTES_UNSUPPORTED_REASON
    required_package = required_extra = "bitsandbytes"

    @property
    def states_per_parameter(self) -> float:
        return 1

    def build(
        self, parameters: Iterable[Any], is_hidden_matrix: IsHiddenMatrix = lambda parameter: False
    ) -> torch.optim.Optimizer:
        bitsandbytes = importlib.import_module("bitsandbytes")
        optimizer: torch.optim.Optimizer = bitsandbytes.optim.Lion(parameters, lr=self.learning_rate)
        return optimizer

    def compute_state_bytes(self, tensor: UpdatedTensor, itemsize: int) -> float:
        return tensor.numel * FP32_BYTES

    def compute_temporary_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int, *, is_on_cpu: bool) -> float:
        """None on a GPU, whose kernel works in place. On a CPU (bitsandbytes/backends/cpu/ops.py of 0.50.2) in fp32 the
        gradient, the momentum's mixture with it, and its sign; of narrower parameters a copy of them, too."""
        if not is_on_cpu:
            return 0.0
        num_copies = 3 if itemsize == FP32_BYTES else 4
        return num_copies * FP32_BYTES * max((tensor.numel for tensor in tensors), default=0)

    def compute_moved_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int) -> float:
        """Parameter and momentum are read and written, the gradient is read."""
        return (3 * itemsize + 2 * FP32_BYTES) * sum(tensor.numel for tensor in tensors)

    def count_kernels(self, tensors: Sequence[UpdatedTensor]) -> int:
        return max(1, len(tensors))
