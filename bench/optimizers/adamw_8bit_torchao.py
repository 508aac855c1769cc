"""AdamW with states of 8 bits (Dettmers et al. 2021, arXiv:2110.02861): torchao's, whose step torch compiles."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.typed_config import OneOf
from bench.optimizers.base import FP32_BYTES, STEP_COUNTER_BYTES, IsHiddenMatrix, OptimizerConfig
from bench.optimizers.updated_tensor import DTENSORS, WHOLE_TENSORS, UpdatedTensor

if TYPE_CHECKING:
    import torch

MIN_8BIT_NUMEL, BLOCK_SIZE = 4096, 256
"""Tensors with fewer elements, or a number that blocks do not divide, keep states in the parameter's format
(``_new_buffer`` in torchao/optim/adam.py of 0.18)."""

CODE_MAP_BYTES = 256 * FP32_BYTES
"""Values of the 256 codes, of which each state has a table of its own."""

KERNELS_PER_TENSOR = 4
"""What the compiler makes of a step; a guess."""


@dataclass(frozen=True)
class TorchaoAdamW8bitConfig(OptimizerConfig):
    """Two states of one byte per element with an fp32 scale per block of 256, in the parameter's format for small
    tensors and such as blocks do not divide.

    On DTensors each rank has blocks of its own rows, so states are rounded in other blocks than one process would have.
    """

    implementation: Annotated[str, OneOf("torchao")]
    """torchao: kernels that torch.compile makes for each shape."""

    label = "8-bit AdamW (torchao)"
    supported_tensors = (WHOLE_TENSORS, DTENSORS)
    unsupported_reason = (
        "torchao compiles its step for every shape, which did not end within minutes there. Choose strategy ddp, "
        "zero1 or fsdp, or optimizer=adamw"
    )
    updates_like_one_process = (WHOLE_TENSORS,)
    required_package, required_extra = "torchao", "fp8"

    @property
    def states_per_parameter(self) -> float:
        return 2 / FP32_BYTES

    def build(
        self, parameters: Iterable[Any], is_hidden_matrix: IsHiddenMatrix = lambda parameter: False
    ) -> torch.optim.Optimizer:
        torchao_optim = importlib.import_module("torchao.optim")
        optimizer: torch.optim.Optimizer = torchao_optim.AdamW8bit(parameters, lr=self.learning_rate)
        return optimizer

    def compute_state_bytes(self, tensor: UpdatedTensor, itemsize: int) -> float:
        """2 (n + 4 n / 256 + 1024) bytes, or those of AdamW; and the counter of steps."""
        if not _is_quantised(tensor):
            return 2 * itemsize * tensor.numel + STEP_COUNTER_BYTES
        scale_bytes = FP32_BYTES * tensor.numel // BLOCK_SIZE
        return 2 * (tensor.numel + scale_bytes + CODE_MAP_BYTES) + STEP_COUNTER_BYTES

    def compute_temporary_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int, *, is_on_cpu: bool) -> float:
        """Both states of the largest quantised tensor in fp32, between what finds the scales of their blocks and what
        rounds them (``single_param_adam`` in torchao/optim/adam.py of 0.18). The compiler may keep less: no peak that
        was measured on a CPU lay in the optimizer's step."""
        return 2 * FP32_BYTES * max((tensor.numel for tensor in tensors if _is_quantised(tensor)), default=0)

    def compute_moved_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int) -> float:
        """Parameter and states are read and written, the gradient is read; the states in fp32 are written and read."""
        state_bytes = sum(self.compute_state_bytes(tensor, itemsize) for tensor in tensors)
        return (3 * itemsize + 4 * FP32_BYTES) * sum(tensor.numel for tensor in tensors) + 2 * state_bytes

    def count_kernels(self, tensors: Sequence[UpdatedTensor]) -> int:
        return max(1, KERNELS_PER_TENSOR * len(tensors))


def _is_quantised(tensor: UpdatedTensor) -> bool:
    return tensor.numel >= MIN_8BIT_NUMEL and tensor.numel % BLOCK_SIZE == 0
