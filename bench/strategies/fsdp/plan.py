"""What FSDP2 stores and sends in a step: its collectives, buffers and streams."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.optimizers import UpdatedTensor
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.sharding import ShardedPlan
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    ALL_GATHER_STREAM,
    GRADIENT_MEMORY,
    GRADIENTS_ACCUMULATED,
    GRADIENTS_KEPT,
    REDUCE_INPUT,
    REDUCE_STREAM,
    REDUCTION_MEMORY,
    PlanDevice,
    allocate_copy_in_briefly,
    name_unit_gradients,
)

if TYPE_CHECKING:
    from bench.strategies.fsdp.strategy import FSDP2Strategy


def choose_sharded_dimension(shape: Sequence[int], num_ranks: int) -> int:
    """The dimension along which a parameter is cut into shards: the first one.

    But of a stack of matrices, the experts of a layer, that are fewer than the ranks or not divisible among them, the
    next one that is: otherwise some ranks would have one expert more than others, or an expert where others have none.
    """
    is_uneven_stack = len(shape) == 3 and shape[0] % num_ranks > 0
    return next((dim for dim in (1, 2) if shape[dim] % num_ranks == 0), 0) if is_uneven_stack else 0


class FSDP2Plan(ShardedPlan):
    """What `fully_shard` does, read in torch 2.13 (``torch/distributed/fsdp/_fully_shard``).

    Each parameter is cut along one dimension into F shards of equal size, those of the first one padded; what is cut
    along another is copied once more when it is gathered, and before its gradient is reduced. An all-gather
    arrives in one buffer and is then copied out into whole parameters. Gradients are copied into one buffer, in the
    format they are reduced in, and reduce-scattered. Where the mesh has replicas an all-reduce among them follows, and
    what it reduced is kept until backward is over.
    """

    def __init__(self, strategy: FSDP2Strategy, inputs: PlanInputs, *, cuts_first_dimension: bool = False) -> None:
        super().__init__(strategy, inputs)
        self._strategy = strategy
        self._cuts_first_dimension = cuts_first_dimension
        self._accumulated_units: set[int] = set()
        self._gathering_units: set[int] = set()
        self._forward_buffer: str | None = None
        self._reduce_input_unit: int | None = None
        sizes_by_parameters: dict[tuple[int, ...], _UnitSizes] = {}  # blocks that repeat have the same ones
        self._unit_sizes: dict[int, _UnitSizes] = {}
        for index, unit in self._units.items():
            parameter_ids = tuple(map(id, unit.parameters))
            if parameter_ids not in sizes_by_parameters:
                sizes_by_parameters[parameter_ids] = self._compute_unit_sizes(unit)
            self._unit_sizes[index] = sizes_by_parameters[parameter_ids]

    def _choose_sharded_dimension(self, parameter: ParameterSpec) -> int:
        if parameter.is_expert and self.inputs.expert_shards is not None:
            return parameter.choose_expert_dimension(self.inputs.expert_shards)
        return 0 if self._cuts_first_dimension else choose_sharded_dimension(parameter.shape, self._sharding_factor)

    def _compute_shard_numel(self, parameter: ParameterSpec) -> int:
        return parameter.compute_first_shard_numel(
            self.count_shards(parameter), self._choose_sharded_dimension(parameter)
        )

    def _recut(self, parameter: ParameterSpec) -> ParameterSpec:
        """A parameter as its gradient is reduced: shards one below the other."""
        if not self._choose_sharded_dimension(parameter):
            return parameter
        num_shards = self.count_shards(parameter)
        return dataclasses.replace(parameter, shape=(num_shards, parameter.numel // num_shards))

    def _list_recut_bytes(self, parameters: Sequence[ParameterSpec]) -> list[int]:
        """Bytes, in the format they are computed in, of the parameters that are not cut along the first dimension."""
        return [
            self.compute_gradient_bytes(parameter)
            for parameter in parameters
            if self._choose_sharded_dimension(parameter)
        ]

    def _compute_unit_sizes(self, unit: ShardingUnit) -> _UnitSizes:
        """Elements and bytes of a unit, whole (padded) and on this rank."""
        shard_numels = [self._compute_shard_numel(parameter) for parameter in unit.parameters]
        shard_bytes = [
            numel * self.inputs.find_compute_itemsize(parameter)
            for numel, parameter in zip(shard_numels, unit.parameters, strict=True)
        ]
        trained_shards = [
            (self._compute_shard_numel(parameter), self.inputs.find_compute_itemsize(parameter))
            for parameter in unit.trained_parameters
        ]
        stored_bytes = [
            numel * self.inputs.find_stored_itemsize(parameter)
            for numel, parameter in zip(shard_numels, unit.parameters, strict=True)
        ]
        casts = [self._casts_unit(unit) and parameter.quantised_bytes is None for parameter in unit.parameters]
        return _UnitSizes(
            sum(shard_numels),
            sum(stored_bytes),
            max(stored_bytes, default=0) if self._casts_unit(unit) else sum(stored_bytes),
            sum(shard_bytes),
            sum(size for size, is_cast in zip(shard_bytes, casts, strict=True) if is_cast),
            _compute_cast_peak_bytes(shard_bytes, casts),
            sum(numel for numel, _ in trained_shards),
            sum(numel * size for numel, size in trained_shards),
            sum(self._list_recut_bytes(unit.parameters)),
            tuple(self._list_recut_bytes(unit.trained_parameters)),
            sum(map(self.compute_gradient_bytes, unit.trained_parameters)),
            unit.trained_numel * self.inputs.reduce_itemsize,
            self.count_unit_shards(unit),
        )

    def compute_shard_numel(self, unit: ShardingUnit) -> int:
        """Of all its parameters' shards."""
        return self._unit_sizes[unit.index].shard_numel

    def compute_shard_bytes(self, unit: ShardingUnit) -> int:
        return self._unit_sizes[unit.index].stored_bytes

    def compute_gradient_shard_numel(self, unit: ShardingUnit) -> int:
        """Of the shards of those that are trained."""
        return self._unit_sizes[unit.index].trained_shard_numel

    @functools.cached_property
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        """The first rank's shards, which are never smaller than the others'; blocks that are alike share theirs."""
        shards: dict[int, UpdatedTensor] = {}
        for parameter in self.inputs.trained_parameters:
            if id(parameter) not in shards:
                shards[id(parameter)] = parameter.build_first_shard(
                    self.count_shards(parameter), self._choose_sharded_dimension(parameter)
                )
        return [shards[id(parameter)] for parameter in self.inputs.trained_parameters]

    def before_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Gather the unit; its buffer stays until the next one's parameters are copied out."""
        self._start_all_gather(device, unit)
        self._copy_out_all_gather(device, unit, forward=True)
        next_unit = self._find_next_forward_unit(unit)
        if self._strategy.forward_prefetch and next_unit is not None:
            self._start_all_gather(device, next_unit)

    def _find_next_forward_unit(self, unit: ShardingUnit) -> ShardingUnit | None:
        """The unit after one of blocks: layers within one are not prefetched, and prefetch nothing."""
        if unit.is_root or unit.is_within_next_unit:
            return None
        later_units = (self._units[index] for index in range(unit.index + 1, self._last_index + 1))
        return next((later_unit for later_unit in later_units if not later_unit.is_within_next_unit), None)

    def _reduces_in_other_dtype(self, unit: ShardingUnit) -> bool:
        """Whether gradients are reduced in another format than they are computed in."""
        return self.inputs.reduce_itemsize != self._find_compute_itemsize(unit)

    def after_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Free the whole parameters, but not the root's, which backward needs at once."""
        device.run_hooks(0.5)
        if unit.is_root:
            self._free_forward_buffer(device)
        elif self._strategy.reshard_after_forward:
            self._reshard_unit(device, unit)

    def before_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Gather the unit again, and start with the one before it."""
        self._start_all_gather(device, unit)
        self._copy_out_all_gather(device, unit, forward=False)
        next_unit = self._find_next_backward_unit(unit)
        if next_unit is not None and (self._strategy.backward_prefetch or unit.is_root):
            self._start_all_gather(device, next_unit)

    def compute_gradient_bytes(self, parameter: ParameterSpec) -> int:
        """In the format it is computed in."""
        return parameter.numel * self.inputs.find_compute_itemsize(parameter)

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """Whole until the unit's backward is over."""
        return (
            GRADIENTS_ACCUMULATED
            if unit.index in self._accumulated_units and not self._reduces_in_other_dtype(unit)
            else GRADIENTS_KEPT
        )

    def after_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Free the whole parameters, then reduce the gradients or keep them for the next micro-batch."""
        device.run_hooks()
        sizes = self._unit_sizes[unit.index]
        is_accumulated = unit.index in self._accumulated_units and self._reduces_in_other_dtype(unit)
        if unit.index in self._accumulated_units and unit.trained_parameters:
            kept_bytes = sizes.cast_gradient_bytes if is_accumulated else sizes.gradient_bytes
            self.add_gradients(device, sizes.gradient_bytes, kept_bytes)
        if is_accumulated:
            self._accumulate_gradients(device, unit)
        self._reshard_unit(device, unit)
        if not self._synchronize:
            if self._reduces_in_other_dtype(unit) and not is_accumulated and unit.trained_parameters:
                self._cast_accumulated_gradients(device, unit)
            self._accumulated_units.add(unit.index)
            return
        self._accumulated_units.discard(unit.index)
        if not sizes.trained_shard_numel:
            return
        if self._reduce_input_unit is not None:
            # One unit's input at a time: this unit's waits until the one before it is reduced.
            device.wait_for_event(f"reduce-scatter {self._reduce_input_unit}")
            device.free(f"reduce input {self._reduce_input_unit}")
        for size in sizes.trained_recut_bytes:
            device.allocate("recut", size, REDUCTION_MEMORY)
            device.copy_within_device("recut", 2 * size)
            device.free("recut")
        num_shards = sizes.num_shards
        reduce_bytes = sizes.trained_shard_numel * num_shards * self.inputs.reduce_itemsize
        device.allocate(f"reduce input {unit.index}", reduce_bytes, REDUCTION_MEMORY)
        if self.inputs.is_on_cpu:
            itemsize = self.inputs.reduce_itemsize if is_accumulated else self._find_compute_itemsize(unit)
            reduced = [self._recut(parameter) for parameter in unit.trained_parameters]
            allocate_copy_in_briefly(device, reduced, num_shards, itemsize, self.inputs.reduce_itemsize)
        device.copy_within_device(REDUCE_INPUT, sizes.gradient_shard_bytes * num_shards + reduce_bytes)
        self._free_gradients(device, unit)
        self._reduce_gradients(device, unit, reduce_bytes)
        self._reduce_input_unit = unit.index

    def _reduce_gradients(self, device: PlanDevice, unit: ShardingUnit, reduce_bytes: float) -> None:
        index, numel = unit.index, self._unit_sizes[unit.index].trained_shard_numel
        is_reduced_as_stored = self.inputs.reduce_itemsize == self.inputs.parameter_itemsize
        shard_name = f"gradient shard {index}"
        is_accumulated = shard_name in self._gradient_shards
        output_name = f"reduced {index}" if is_accumulated or not is_reduced_as_stored else shard_name
        device.allocate(
            output_name,
            numel * self.inputs.reduce_itemsize,
            GRADIENT_MEMORY if output_name == shard_name else REDUCTION_MEMORY,
            stream=REDUCE_STREAM,
        )
        self._start_gradient_reduction(device, unit, reduce_bytes)
        if self._offloads_parameters:  # the CPU takes the result as it comes
            device.free(output_name)
            return
        if not is_reduced_as_stored:
            name = f"cast {index}" if is_accumulated else shard_name
            device.allocate(name, numel * self.inputs.parameter_itemsize, GRADIENT_MEMORY, stream=REDUCE_STREAM)
            if is_accumulated:
                device.free(name)
        if is_accumulated:
            device.copy_within_device("add gradient shard", 3 * numel * self.inputs.parameter_itemsize)
        if output_name != shard_name and not self._has_replicas:
            device.free(output_name)
        self._gradient_shards.add(shard_name)

    def _cast_accumulated_gradients(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Without communication whole gradients stay, in the format they will be reduced in: one after the other."""
        sizes = self._unit_sizes[unit.index]
        device.copy_within_device("to the format that is reduced", sizes.gradient_bytes + sizes.cast_gradient_bytes)
        cast_bytes = 0
        for parameter in unit.trained_parameters:
            cast_bytes += parameter.numel * self.inputs.reduce_itemsize
            device.allocate(f"accumulated {unit.index}", cast_bytes, GRADIENT_MEMORY)
            device.grow_allocation(name_unit_gradients(unit), -self.compute_gradient_bytes(parameter), GRADIENT_MEMORY)
        device.free(name_unit_gradients(unit))

    def _accumulate_gradients(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Gradients are added to those that stayed, one after the other, which a CPU converts first."""
        for parameter in unit.trained_parameters if self.inputs.is_on_cpu else ():
            device.allocate("converted", parameter.numel * self.inputs.reduce_itemsize, GRADIENT_MEMORY)
            device.free("converted")
            device.grow_allocation(name_unit_gradients(unit), -self.compute_gradient_bytes(parameter), GRADIENT_MEMORY)
        device.free(name_unit_gradients(unit))

    def _free_gradients(self, device: PlanDevice, unit: ShardingUnit) -> None:
        device.free(name_unit_gradients(unit))
        device.free(f"accumulated {unit.index}")

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """Wait for the last unit's gradients; the buffers go."""
        if self._reduce_input_unit is not None:
            device.free(f"reduce input {self._reduce_input_unit}")
            self._reduce_input_unit = None
            for name in self._pending_events:
                device.wait_for_event(name)
        for unit in self._units.values():
            device.free(f"reduced {unit.index}")

    def _start_all_gather(self, device: PlanDevice, unit: ShardingUnit) -> None:
        if unit.index in self._gathering_units or unit.index in self._unsharded_units:
            return
        self._gathering_units.add(unit.index)
        device.run_hooks()
        sizes = self._unit_sizes[unit.index]
        self._upload_shard(device, unit, sizes.upload_bytes)
        if sizes.num_shards == 1:
            return
        gathered_bytes = sizes.shard_bytes * sizes.num_shards
        casts = self._casts_unit(unit)
        if casts:
            device.allocate("cast", sizes.cast_bytes, ALL_GATHER_MEMORY, stream=ALL_GATHER_STREAM)
            device.free(f"upload {unit.index}")
        device.allocate(f"buffer {unit.index}", gathered_bytes, ALL_GATHER_MEMORY, stream=ALL_GATHER_STREAM)
        if casts:
            device.free("cast")
        else:
            device.free(f"upload {unit.index}")
        group = self.find_shard_group(unit)
        device.run_collective(f"all-gather {unit.index}", "all-gather", gathered_bytes, group, ALL_GATHER_STREAM)

    def _copy_out_all_gather(self, device: PlanDevice, unit: ShardingUnit, *, forward: bool) -> None:
        if unit.index not in self._gathering_units:
            return
        self._gathering_units.discard(unit.index)
        self._unsharded_units.add(unit.index)
        sizes = self._unit_sizes[unit.index]
        num_shards = sizes.num_shards
        unsharded_bytes = sizes.shard_bytes * num_shards
        if num_shards > 1:
            device.wait_for_event(f"all-gather {unit.index}")
        elif self._offloads_parameters:
            device.wait_for_event(f"upload {unit.index}")
        if (
            forward and self._forward_buffer is not None
        ):  # the next gather waits until the unit before this one is copied out
            device.follow_stream(ALL_GATHER_STREAM, f"copied {self._forward_buffer}")
        device.allocate(f"whole {unit.index}", unsharded_bytes, ALL_GATHER_MEMORY)
        recut_bytes = sizes.recut_bytes if num_shards > 1 else 0
        if recut_bytes:
            device.allocate("recut", recut_bytes, ALL_GATHER_MEMORY)
        device.copy_within_device("copy out", 2 * (unsharded_bytes + recut_bytes))
        if recut_bytes:
            device.free("recut")
        device.record_event(f"copied buffer {unit.index}")
        if forward:
            self._free_forward_buffer(device)
        if num_shards == 1:
            device.allocate("cast", sizes.cast_peak_bytes, ALL_GATHER_MEMORY)
            stored_itemsize, cast_itemsize = self.inputs.parameter_itemsize, self._find_compute_itemsize(unit)
            device.copy_within_device("cast", sizes.cast_bytes * (1 + stored_itemsize / cast_itemsize))
            device.free("cast")
            device.free(f"upload {unit.index}")
        elif forward:
            self._forward_buffer = f"buffer {unit.index}"
        else:
            device.follow_stream(ALL_GATHER_STREAM, f"copied buffer {unit.index}")
            device.free(f"buffer {unit.index}")

    def _free_forward_buffer(self, device: PlanDevice) -> None:
        if self._forward_buffer is not None:
            device.free(self._forward_buffer)
            self._forward_buffer = None

    def _reshard_unit(self, device: PlanDevice, unit: ShardingUnit) -> None:
        self._unsharded_units.discard(unit.index)
        device.free(f"whole {unit.index}")


@dataclass(frozen=True)
class _UnitSizes:
    """Of a unit on one rank."""

    shard_numel: int
    """Elements of its shards."""
    stored_bytes: int
    """Bytes of them as they are stored."""
    upload_bytes: int
    """Bytes of these that are on the device at once: what is cast comes one parameter after the other."""
    shard_bytes: int
    """Bytes of them in the format they are computed in."""
    cast_bytes: int
    """Of these, bytes of what is cast before it is gathered."""
    cast_peak_bytes: int
    """Bytes that casting one parameter after the other needs beyond the whole unit."""
    trained_shard_numel: int
    """Elements of the shards of parameters that have gradients."""
    gradient_shard_bytes: int
    """Bytes of these in the format they are computed in."""
    recut_bytes: int
    """Whole bytes, in that format, of parameters that are not cut along the first dimension."""
    trained_recut_bytes: tuple[int, ...]
    """Of each of these that has a gradient."""
    gradient_bytes: float
    """Of its whole gradients in the format they are computed in."""
    cast_gradient_bytes: float
    """Of these in the format they are reduced in."""
    num_shards: int
    """Ranks that it is sharded over."""


def _compute_cast_peak_bytes(sizes: Sequence[int], casts: Sequence[bool]) -> int:
    """With one rank per copy each parameter that is cast is copied and forgotten before the next one's turn."""
    allocated, peak = 0, 0
    for size, is_cast in zip(sizes, casts, strict=True):
        peak = max(peak, allocated + (2 if is_cast else 1) * size)
        allocated += size
    return peak - allocated
