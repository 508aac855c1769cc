"""What a plan is made from: parameters, the units they are sharded in, and the facts of the run."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from bench.core.precision import Precision
from bench.optimizers import OptimizerConfig, UpdatedTensor


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as the model has it, or as it is stored where it is quantised."""

    name: str
    """Within its block; for the root, within the model."""
    shape: tuple[int, ...]
    keeps_fp32: bool = False
    """Computed in fp32 even where the rest is in 16 bits."""
    is_trained: bool = True
    """Has a gradient and optimizer state."""
    quantised_bytes: int | None = None
    """Bytes of a quantised weight, in any precision."""
    scale_bytes: int = 0
    """Bytes of its scales, which no strategy shards."""
    is_hidden_matrix: bool = False
    """The weight of a layer within a block, with two dimensions."""
    is_expert: bool = False
    """Of the experts of a layer, where other ranks have other ones."""

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def compute_first_shard_numel(self, num_ranks: int, dimension: int = 0) -> int:
        """Elements of the first of so many shards along a dimension, than which the others are never larger."""
        rows = self.shape[dimension] if self.shape else 1
        return -(-rows // num_ranks) * (self.numel // rows)

    def choose_expert_dimension(self, num_ranks: int) -> int:
        """The first dimension that so many ranks divide evenly, along which experts are cut; else the first."""
        return next((dim for dim, size in enumerate(self.shape) if size % num_ranks == 0), 0)

    @functools.cached_property
    def updated_tensor(self) -> UpdatedTensor:
        """The whole parameter, as an optimizer has it."""
        return UpdatedTensor(self.shape, self.is_hidden_matrix)

    def build_first_shard(self, num_ranks: int, dimension: int = 0) -> UpdatedTensor:
        """The first of so many shards along a dimension, as an optimizer has it."""
        shape = list(self.shape or (1,))
        rows = shape[dimension]
        shape[dimension] = -(-rows // num_ranks)
        return UpdatedTensor(tuple(shape), self.is_hidden_matrix, num_ranks, rows)

    def compute_padded_numel(self, num_ranks: int) -> int:
        """Elements of all shards, the last ones padded, where they are not all of one size; else 0."""
        padded_numel = self.compute_first_shard_numel(num_ranks) * num_ranks
        return padded_numel if padded_numel != self.numel else 0


@dataclass(frozen=True)
class ShardingUnit:
    """Parameters that a sharding strategy gathers as one: a group of blocks, or the root with what is left."""

    index: int
    """In the order in which forward passes end; the root, which is needed first and last, has -1."""
    name: str
    parameters: tuple[ParameterSpec, ...]
    is_within_next_unit: bool = False
    """It is a layer within the next unit that is none."""
    list_index: int = 0
    """Of the list of blocks that it is from."""

    @functools.cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @functools.cached_property
    def trained_parameters(self) -> tuple[ParameterSpec, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.is_trained)

    @functools.cached_property
    def trained_numel(self) -> int:
        return sum(parameter.numel for parameter in self.trained_parameters)

    @functools.cached_property
    def keeps_fp32(self) -> bool:
        """Whether it is computed in fp32 even where the rest is in 16 bits."""
        return all(parameter.keeps_fp32 for parameter in self.parameters) and bool(self.parameters)

    @property
    def is_root(self) -> bool:
        """Whether this is what lies outside the blocks."""
        return self.index < 0


@dataclass(frozen=True)
class PlanInputs:
    """What a plan must know of the run."""

    units: tuple[ShardingUnit, ...]
    """The root first, then the others in the order in which their forward passes end."""
    precision: Precision
    world_size: int
    optimizer: OptimizerConfig
    num_micro_batches: int
    keep_gradients: bool = False
    """Gradients are filled with zeros after a step, not freed."""
    gradient_accumulation_fusion: bool = False
    """Products add gradients to those of earlier micro-batches themselves."""
    outputs_bytes: float = 0.0
    """Of everything the model returns for a micro-batch."""
    logits_bytes: float = 0.0
    """Of its logits alone."""
    casts_parameters: bool = True
    """Parameters are cast to the format that is computed in; else autocast does what is mixed."""
    is_on_cpu: bool = False
    """The device is a CPU, where some of torch's operators need memory that a GPU's kernels do not."""
    expert_shards: int | None = None
    """Ranks that experts are sharded over, where these are others than those of all else."""
    explicit_parameter_order: tuple[tuple[int, int], ...] = ()
    """All parameters in the order of the model, which is the optimizer's: each as the position of its unit in `units`,
    and its own there. Empty: as the units have them."""

    @functools.cached_property
    def parameter_order(self) -> tuple[tuple[int, int], ...]:
        numbered_units = enumerate(self.units)
        return self.explicit_parameter_order or tuple(
            (unit_index, position) for unit_index, unit in numbered_units for position in range(len(unit.parameters))
        )

    @functools.cached_property
    def trained_parameters(self) -> tuple[ParameterSpec, ...]:
        """All that have gradients, in the order of the model."""
        ordered = (self.units[unit_index].parameters[position] for unit_index, position in self.parameter_order)
        return tuple(parameter for parameter in ordered if parameter.is_trained)

    @functools.cached_property
    def parameter_itemsize(self) -> int:
        return self.precision.parameter_itemsize

    def compute_stored_bytes(self, parameter: ParameterSpec) -> int:
        """Whole, without scales."""
        if parameter.quantised_bytes is not None:
            return parameter.quantised_bytes
        return parameter.numel * self.parameter_itemsize

    def find_stored_itemsize(self, parameter: ParameterSpec) -> int:
        """Of one element of a parameter as it is stored: what is quantised is stored as the model takes it."""
        return self.parameter_itemsize if parameter.quantised_bytes is None else self.cast_itemsize

    @functools.cached_property
    def scale_bytes(self) -> int:
        """Of all quantised weights: every rank has them."""
        return sum(parameter.scale_bytes for unit in self.units for parameter in unit.parameters)

    @functools.cached_property
    def reduce_itemsize(self) -> int:
        """Of one element of a gradient that is reduced."""
        return self.precision.reduce_itemsize

    @functools.cached_property
    def cast_itemsize(self) -> int:
        """Of one element of a parameter as the strategy hands it to the model, and of its gradient."""
        return self.precision.compute_itemsize if self.casts_parameters else self.parameter_itemsize

    def find_compute_itemsize(self, parameter: ParameterSpec) -> int:
        """The same of a parameter that may stay in fp32."""
        return 4 if parameter.keeps_fp32 else self.cast_itemsize
