"""What is stored, computed and reduced in which number format."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.installation import format_install_command
from bench.core.typed_config import OneOf

if TYPE_CHECKING:
    import torch

AUTOCAST_MIXING, PARAMETER_MIXING = MIXING_MODES = "autocast", "parameters"
"""Ways of mixed precision."""

TRANSFORMER_ENGINE = "transformer_engine"
"""FP8 of NVIDIA's TransformerEngine: the kernels before a product write its operands in 8 bits, where torchao's layers
scale and round what others wrote, and weights are rounded once a step (``is_first_microbatch``;
``transformer_engine/pytorch/module/layernorm_mlp.py`` in https://github.com/NVIDIA/TransformerEngine)."""

TORCH_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of number formats. Whoever reads rows needs no torch, whose import takes seconds and 200 MB."""


FORMAT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of a number in each format."""


@functools.cache
def get_torch_dtype(name: str) -> torch.dtype:
    """torch's type of a format: fp32, bf16 or fp16."""
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_DTYPE_NAMES[name])
    return dtype


@dataclass(frozen=True)
class Precision:
    """Number formats of a run.

    Mixed precision is `compute` narrower than `parameters`. How it is done makes as much difference as sharding may:
    strategies are compared in the same `mixing`.
    """

    name: str
    parameters: Annotated[str, OneOf("fp32", "bf16")]
    """Format parameters, gradients and optimizer state are kept in: fp32 or bf16."""
    compute: Annotated[str, OneOf(*TORCH_DTYPE_NAMES)]
    """Format of matmul inputs: fp32, bf16 or fp16."""
    reduce: Annotated[str, OneOf(*TORCH_DTYPE_NAMES)]
    """Format gradients are reduced in across ranks: fp32, bf16 or fp16."""
    tf32: bool = False
    """Whether fp32 matmuls may use TF32 tensor cores."""
    peak: Annotated[str, OneOf("fp32", "tf32", "bf16", "fp16", "fp8")] = "fp32"
    """Which of the hardware's peaks MFU divides by: fp32, tf32, bf16, fp16 or fp8."""
    float8: Annotated[str, OneOf("none", "tensorwise", "rowwise", TRANSFORMER_ENGINE)] = "none"
    """How the blocks' linear layers compute in FP8: by torchao with scales that are tensorwise or rowwise, as
    transformer_engine has it, which is predicted only, or none to leave them in `compute`."""
    float8_emulated: bool = False
    """Round to 8 bits and multiply in fp32, on any device: for its accuracy, not its speed."""

    mixing: Annotated[str | None, OneOf(*MIXING_MODES)] = None
    """How mixed precision is done: autocast, over parameters that stay as they are stored; or parameters, that are cast
    before they are used, as FSDP's mixed-precision policy does. null: as each strategy's users do it, autocast but for
    FSDP and DeepSpeed. Without effect where nothing is mixed."""

    def __post_init__(self) -> None:
        if self.parameters == "bf16" and self.compute != "bf16":
            raise invalid_value_error("precision.compute", self.compute, "bf16, since precision.parameters=bf16")
        if self.tf32 and self.compute != "fp32":
            raise invalid_value_error(
                "precision.tf32", True, f"false, since precision.compute={self.compute} is not fp32"
            )
        if self.uses_float8 and self.compute != "bf16":
            raise invalid_value_error("precision.compute", self.compute, f"bf16, since precision.float8={self.float8}")
        if self.float8_emulated and not self.uses_torchao:
            valid = f"false, since precision.float8={self.float8}"
            raise invalid_value_error("precision.float8_emulated", True, valid)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Dtype of the stored parameters."""
        return get_torch_dtype(self.parameters)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matmul inputs."""
        return get_torch_dtype(self.compute)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the gradient reduction."""
        return get_torch_dtype(self.reduce)

    @property
    def parameter_itemsize(self) -> int:
        """Bytes of a stored parameter."""
        return FORMAT_BYTES[self.parameters]

    @property
    def compute_itemsize(self) -> int:
        """Bytes of an input of matmuls."""
        return FORMAT_BYTES[self.compute]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes of a gradient as it is reduced."""
        return FORMAT_BYTES[self.reduce]

    @property
    def uses_float8(self) -> bool:
        """Whether linear layers compute in FP8."""
        return self.float8 != "none"

    @property
    def uses_torchao(self) -> bool:
        """Whether torchao's layers are what computes in FP8."""
        return self.uses_float8 and not self.uses_transformer_engine

    @property
    def uses_transformer_engine(self) -> bool:
        """Whether TransformerEngine's kernels are what computes in FP8."""
        return self.float8 == TRANSFORMER_ENGINE

    @property
    def is_mixed(self) -> bool:
        """Whether matmuls run in a narrower format than parameters are stored in."""
        return self.compute != self.parameters

    @property
    def scales_loss(self) -> bool:
        """Whether the loss must be scaled so that small gradients survive (fp16)."""
        return self.compute == "fp16"


def require_torchao(precision: Precision) -> None:
    """Raise `ImpossibleError` where torchao, which only FP8 needs, is missing."""
    if importlib.util.find_spec("torchao") is None:
        raise ImpossibleError(
            f"precision={precision.name} needs torchao, which is not installed: choose bf16, or install the extra fp8 "
            f"({format_install_command('fp8')})."
        )
