"""What every optimizer says: how it is built, what it keeps, needs for a while, moves and computes, where it works."""

from __future__ import annotations

import functools
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bench.core import plugins
from bench.core.errors import ImpossibleError
from bench.core.installation import format_install_command
from bench.core.typed_config import OneOf, Within
from bench.optimizers.updated_tensor import (
    DIVIDED_DTENSORS,
    DTENSORS,
    FLAT_TENSORS,
    PARTS,
    WHOLE_TENSORS,
    UpdatedTensor,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

TORCH_IMPLEMENTATIONS = ("fused", "foreach", "for_loop")

ALL_TENSORS = (WHOLE_TENSORS, PARTS, DTENSORS, DIVIDED_DTENSORS, FLAT_TENSORS)

IsHiddenMatrix = Callable[["nn.Parameter"], bool]

FP32_BYTES = 4

STEP_COUNTER_BYTES = 4
"""torch's optimizers count the steps of each parameter in an fp32 tensor of its own."""

TENSORS_PER_UPDATE_KERNEL = {"fused": 32, "foreach": 8, "for_loop": 1 / 12}
"""Tensors a launch of the optimizer's kernels works on."""


@dataclass(frozen=True)
class MatrixProduct:
    """Products of matrices of one shape, (m, k) times (k, n), in bf16."""

    m: int
    n: int
    k: int
    count: int = 1


@dataclass(frozen=True)
class UpdateCollective:
    """Collectives within the optimizer's step, of so many bytes each (the whole, gathered), among those that share a
    DTensor."""

    kind: str
    size: float
    count: int = 1


@dataclass(frozen=True)
class OptimizerConfig(ABC):
    """An optimizer and its knobs. Subclasses add knobs as fields."""

    name: str
    """File under bench/optimizers that defines the subclass."""
    implementation: Annotated[str, OneOf(*TORCH_IMPLEMENTATIONS)]
    """fused (one kernel), foreach (one kernel per operation) or for_loop (one kernel per operation and parameter)."""
    learning_rate: Annotated[float, Within(0, 1e38, exclusive_minimum=True)]
    """The same in every step: a schedule would change neither memory nor time."""
    keep_gradients: bool = False
    """Fill gradients with zeros between steps (torch's default before 2.0) instead of freeing them."""

    label: ClassVar[str]
    """What it is called in sentences and tables."""

    supported_tensors: ClassVar[tuple[str, ...]] = ALL_TENSORS
    """Kinds of tensors it was seen to update (`bench.optimizers.updated_tensor`)."""

    unsupported_reason: ClassVar[str] = ""
    """Why it updates no others, as a clause."""

    updates_like_one_process: ClassVar[tuple[str, ...]] = ALL_TENSORS
    """Kinds of tensors of which every rank's part becomes what one process would make of it, but for rounding."""

    updates_offloaded_parameters: ClassVar[bool] = False
    """Whether it was tried where parameters, or the optimizer, are offloaded."""

    required_package: ClassVar[str | None] = None
    """A library that it needs to run, not to be predicted."""

    required_extra: ClassVar[str | None] = None
    """The optional extra of this package that installs it."""

    @property
    @abstractmethod
    def states_per_parameter(self) -> float:
        """Least memory of its states, in tensors of a parameter's size and format."""

    @abstractmethod
    def build(
        self, parameters: Iterable[Any], is_hidden_matrix: IsHiddenMatrix = lambda parameter: False
    ) -> torch.optim.Optimizer:
        """The optimizer over parameters, or groups of them, as they are now: shards, if they are sharded."""

    @abstractmethod
    def compute_state_bytes(self, tensor: UpdatedTensor, itemsize: int) -> float:
        """Bytes of the states of a tensor whose elements have `itemsize` bytes."""

    @abstractmethod
    def compute_temporary_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int, *, is_on_cpu: bool) -> float:
        """Most bytes that a step over these tensors, in their order, allocates for a while."""

    @abstractmethod
    def compute_moved_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int) -> float:
        """Bytes that a step reads and writes, matrix products aside."""

    def count_kernels(self, tensors: Sequence[UpdatedTensor]) -> int:
        """Kernels that a step launches, matrix products aside."""
        return max(1, round(len(tensors) / TENSORS_PER_UPDATE_KERNEL[self.implementation]))

    def list_matrix_products(self, tensors: Sequence[UpdatedTensor]) -> list[MatrixProduct]:
        """Products of matrices in a step."""
        return []

    def list_collectives(self, tensors: Sequence[UpdatedTensor]) -> list[UpdateCollective]:
        """What ranks that share DTensors exchange in a step."""
        return []

    def check_tensors(self, strategy: str, tensor_kind: str) -> None:
        """Raise `ImpossibleError` where it cannot update what a strategy has."""
        if tensor_kind not in self.supported_tensors:
            raise ImpossibleError(
                f"optimizer={self.name} is not valid with strategy={strategy}, whose parameters are {tensor_kind}: "
                f"{self.unsupported_reason}."
            )

    def check_offloaded_state(self, strategy: str, offloaded_state: str) -> None:
        """Raise `ImpossibleError` where something is offloaded (empty: nothing) and nobody has tried that."""
        if offloaded_state and not self.updates_offloaded_parameters:
            raise ImpossibleError(
                f"optimizer={self.name} is not valid with strategy={strategy} and {offloaded_state} on the CPU, which "
                "was not tried: choose optimizer=adamw or sgd, or offload nothing."
            )

    def check_installed(self) -> None:
        """Raise `ImpossibleError` where its library is missing on this machine."""
        package = self.required_package
        if package is not None and importlib.util.find_spec(package) is None:
            assert self.required_extra is not None
            raise ImpossibleError(
                f"optimizer={self.name} needs the package {package}, which is not installed: "
                f"{format_install_command(self.required_extra)}, or choose optimizer=adamw. mode=predict does not need "
                "it."
            )


def list_parameter_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups of parameters, of parameters or of such groups."""
    items = list(parameters)
    return items if items and isinstance(items[0], dict) else [{"params": items}]


def load_optimizer(name: str) -> type[OptimizerConfig]:
    """The class that ``bench/optimizers/<name>.py`` defines.

    Raises
    ------
    UsageError
        If there is none of this name.
    """
    optimizer_class: type[OptimizerConfig] = plugins.find_own_plugin_class(
        "optimizer.name", name, sys.modules[__package__], OptimizerConfig
    )
    return optimizer_class


@functools.cache
def list_optimizers() -> dict[str, type[OptimizerConfig]]:
    """The classes by their names."""
    names = plugins.list_plugin_names(sys.modules[__package__], OptimizerConfig)
    return {name: load_optimizer(name) for name in names}
