"""AdamW with states of 8 bits (Dettmers et al. 2021, arXiv:2110.02861): bitsandbytes'."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.typed_config import OneOf
from bench.optimizers.base import FP32_BYTES, IsHiddenMatrix, OptimizerConfig
from bench.optimizers.lion import BITSANDBYTES_UNSUPPORTED_REASON
from bench.optimizers.updated_tensor import FLAT_TENSORS, PARTS, WHOLE_TENSORS, UpdatedTensor

if TYPE_CHECKING:
    import torch

MIN_8BIT_NUMEL = 4096
"""Tensors with fewer elements keep fp32 states (``min_8bit_size``, bitsandbytes/optim/optimizer.py of 0.50.2)."""

BLOCK_SIZE = 256
"""Elements that share an fp32 scale, the last block with fewer."""


@dataclass(frozen=True)
class AdamW8bitConfig(OptimizerConfig):
    """Two states of one byte per element, an fp32 scale per block of 256; in fp32 for tensors below 4,096 elements.

    Whether a tensor is below that, and which elements share a scale, depends on how much of it a rank has: with flat
    tensors (FSDP1, DeepSpeed) and parts of layers states are rounded in other blocks than one process would have.
    """

    implementation: Annotated[str, OneOf("bitsandbytes")]
    """bitsandbytes: a kernel per parameter."""

    label = "8-bit AdamW"
    supported_tensors = (WHOLE_TENSORS, PARTS, FLAT_TENSORS)
    unsupported_reason = BITSANDBYTES_UNSUPPORTED_REASON
    updates_like_one_process = (WHOLE_TENSORS,)
    required_package = required_extra = "bitsandbytes"

    @property
    def states_per_parameter(self) -> float:
        return 2 / FP32_BYTES

    def build(
        self, parameters: Iterable[Any], is_hidden_matrix: IsHiddenMatrix = lambda parameter: False
    ) -> torch.optim.Optimizer:
        bitsandbytes = importlib.import_module("bitsandbytes")
        optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=self.learning_rate)
        return optimizer

    def compute_state_bytes(self, tensor: UpdatedTensor, itemsize: int) -> float:
        """2 (n + 4 ceil(n / 256)) bytes, or 8 n of small tensors."""
        if tensor.numel < MIN_8BIT_NUMEL:
            return 2 * FP32_BYTES * tensor.numel
        return 2 * (tensor.numel + FP32_BYTES * -(-tensor.numel // BLOCK_SIZE))

    def compute_temporary_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int, *, is_on_cpu: bool) -> float:
        """None on a GPU, whose kernel works in place. On a CPU (bitsandbytes/backends/cpu/ops.py of 0.50.2) in fp32
        both states, the gradient, and the root of the second one before and after its division; of narrower parameters
        a copy of them, too."""
        if not is_on_cpu:
            return 0.0
        num_copies = 5 if itemsize == FP32_BYTES else 6
        return num_copies * FP32_BYTES * max((tensor.numel for tensor in tensors), default=0)

    def compute_moved_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int) -> float:
        """Parameter and states are read and written, the gradient is read."""
        state_bytes = sum(self.compute_state_bytes(tensor, itemsize) for tensor in tensors)
        return 3 * itemsize * sum(tensor.numel for tensor in tensors) + 2 * state_bytes

    def count_kernels(self, tensors: Sequence[UpdatedTensor]) -> int:
        return max(1, len(tensors))
