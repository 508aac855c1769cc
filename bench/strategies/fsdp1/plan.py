"""What FSDP1 stores and sends in a step: its collectives, buffers and streams."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bench.optimizers import UpdatedTensor
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.sharding import ShardedPlan
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    ALL_GATHER_STREAM,
    CAST_STREAM,
    COMPUTE_STREAM,
    GRADIENT_MEMORY,
    GRADIENTS_KEPT,
    NCCL_STREAM,
    REDUCE_STREAM,
    REDUCTION_MEMORY,
    SHARD_GROUP,
    WORLD_GROUP,
    PlanDevice,
    name_unit_gradients,
)

if TYPE_CHECKING:
    from bench.strategies.fsdp1.strategy import FSDP1Strategy


MAX_ALL_GATHERS_IN_FLIGHT = 2
"""All-gathers the rate limiter lets be in flight (``_FreeEventQueue`` in torch 2.13)."""

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class _FlatLayout:
    """A unit's flat parameter."""

    flat_numel: int
    """Elements, padding included."""
    first_parts: tuple[UpdatedTensor, ...]
    """What the first rank has of each parameter."""


class FSDP1Plan(ShardedPlan):
    """What `FullyShardedDataParallel` does with ``use_orig_params``, read in torch 2.13 (``torch/distributed/fsdp``).

    A unit's parameters lie one behind the other in a flat parameter, each aligned to 16 bytes, padded to a multiple of
    F. An all-gather writes into the flat parameter itself. Gradients are put together into a flat one.
    At factor 1 (NO_SHARD) nothing is gathered: whole parameters are cast, if at all, and gradients all-reduced.
    """

    def __init__(self, strategy: FSDP1Strategy, inputs: PlanInputs) -> None:
        super().__init__(strategy, inputs)
        self._strategy = strategy
        self._layouts = self._lay_out_units()
        self._flat_numel = {index: layout.flat_numel for index, layout in self._layouts.items()}
        self._next_forward_unit = self._build_forward_order()
        next_prefetched = self._next_forward_unit if strategy.forward_prefetch else {}
        self._prefetched_by = {next_index: index for index, next_index in next_prefetched.items()}
        self._delayed_units: dict[int, ShardingUnit] = {}
        self._pending_all_gathers: set[int] = set()
        self._kept_flat_gradients: set[str] = set()
        self._finished_frozen_units: list[ShardingUnit] = []

    def _lay_out_units(self) -> dict[int, _FlatLayout]:
        """Of each unit; of blocks that repeat, which have the same parameters, it is worked out once."""
        layouts_by_parameters: dict[tuple[int, ...], _FlatLayout] = {}
        layouts = {}
        for index, unit in self._units.items():
            parameter_ids = tuple(map(id, unit.parameters))
            if parameter_ids not in layouts_by_parameters:
                layouts_by_parameters[parameter_ids] = self._lay_out_unit(unit)
            layouts[index] = layouts_by_parameters[parameter_ids]
        return layouts

    def _lay_out_unit(self, unit: ShardingUnit) -> _FlatLayout:
        aligned_numel = ALIGNMENT_BYTES // self._find_compute_itemsize(unit)
        offsets, end = [], 0
        for parameter in unit.parameters:
            offsets.append(-(-end // aligned_numel) * aligned_numel)
            end = offsets[-1] + parameter.numel
        shard_numel = -(-end // self._sharding_factor)
        first_parts = tuple(
            UpdatedTensor((max(0, min(shard_numel, offset + parameter.numel) - offset),))
            for offset, parameter in zip(offsets, unit.parameters, strict=True)
        )
        return _FlatLayout(shard_numel * self._sharding_factor, first_parts)

    def compute_shard_numel(self, unit: ShardingUnit) -> int:
        """Of its flat parameter, padding included."""
        return self._flat_numel[unit.index] // self._sharding_factor

    def compute_shard_bytes(self, unit: ShardingUnit) -> int:
        return self.compute_shard_numel(unit) * self.inputs.parameter_itemsize

    def compute_gradient_shard_numel(self, unit: ShardingUnit) -> int:
        return self.compute_shard_numel(unit) if unit.trained_parameters else 0

    @functools.cached_property
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        """The first rank's part of every trained parameter: of those at the beginning of a unit, or nothing. At factor
        1 parameters keep their shape."""
        if self._sharding_factor == 1:
            return [parameter.updated_tensor for parameter in self.inputs.trained_parameters]
        units = self.inputs.units
        return [
            self._layouts[units[unit_position].index].first_parts[position]
            for unit_position, position in self.inputs.parameter_order
            if units[unit_position].parameters[position].is_trained
        ]

    def before_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Gather the unit, with prefetching the next one too."""
        self._start_all_gather(device, unit)
        self._wait_for_all_gather(device, unit)
        next_index = self._next_forward_unit.get(unit.index)
        if self._strategy.forward_prefetch and next_index is not None:
            self._start_all_gather(device, self._units[next_index])

    def after_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Free the flat parameter, but not the root's, which backward needs at once."""
        device.run_hooks(0.5)
        if self._sharding_factor == 1 or (self._strategy.reshard_after_forward and not unit.is_root):
            self._reshard_unit(device, unit)

    def before_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Gather the unit again, and, prefetching early, the one before it."""
        self._start_all_gather(device, unit)
        self._wait_for_all_gather(device, unit)
        if self._strategy.backward_prefetch == "pre":
            self._prefetch_next_backward_unit(device, unit)

    def compute_gradient_bytes(self, parameter: ParameterSpec) -> int:
        """In the format it is computed in."""
        return parameter.numel * self.inputs.find_compute_itemsize(parameter)

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """By themselves, until all of the unit's are there."""
        return GRADIENTS_KEPT

    def after_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Its gradients are put together; with forward prefetching only when the unit that prefetched it is done.

        Its parameters became views of the flat one when they were prefetched, before that unit ran, and autograd goes
        backward in the opposite order.
        """
        delayed_unit = self._delayed_units.pop(unit.index, None)
        if delayed_unit is not None:
            self._flatten_gradients(device, delayed_unit)
        prefetched_by = self._prefetched_by.get(unit.index)
        if prefetched_by is None:
            self._flatten_gradients(device, unit)
        else:
            self._delayed_units[prefetched_by] = unit

    def _flatten_gradients(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Free the flat parameter, then reduce or keep the flat gradient."""
        device.run_hooks()
        if not unit.trained_parameters:
            self._reshard_frozen_unit(device, unit)
            return
        index, flat_numel, parameter_itemsize = unit.index, self._flat_numel[unit.index], self.inputs.parameter_itemsize
        size = flat_numel * self._find_compute_itemsize(unit)
        is_accumulated = f"flat gradient {index}" in self._kept_flat_gradients or self._accumulates_in_shard(unit)
        name = "added gradient" if is_accumulated else f"flat gradient {index}"
        device.allocate(name, size, GRADIENT_MEMORY, stream=ALL_GATHER_STREAM)
        device.copy_within_device("flat gradient", 2 * size)
        if is_accumulated:
            itemsize = parameter_itemsize if self._accumulates_in_shard(unit) else self._find_compute_itemsize(unit)
            self.add_gradients(device, size, flat_numel * itemsize)
        device.record_event(name)
        device.follow_stream(ALL_GATHER_STREAM, name)
        device.free(name_unit_gradients(unit), after=ALL_GATHER_STREAM)
        if (
            self._accumulates_in_shard(unit)
            and self.inputs.is_on_cpu
            and self._find_compute_itemsize(unit) != parameter_itemsize
        ):
            device.allocate(
                "converted gradient", flat_numel * parameter_itemsize, GRADIENT_MEMORY
            )  # to the format of what it is added to
            device.free("converted gradient")
        self._reshard_unit(device, unit, stream=ALL_GATHER_STREAM)
        if self._strategy.backward_prefetch == "post" and not unit.is_root:
            self._prefetch_next_backward_unit(device, unit)
        if self._synchronize:
            self._kept_flat_gradients.discard(f"flat gradient {index}")
            self._reduce_gradients(device, unit)
        elif not is_accumulated:
            self._kept_flat_gradients.add(f"flat gradient {index}")
        if is_accumulated:  # autograd holds it until its hooks have run
            device.free(name)

    def _reshard_frozen_unit(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Without gradients of its own a unit is whole until those of all its inputs are complete: with those of a
        decoder's blocks, what the encoder gave to all of them, only after the first block."""
        self._finished_frozen_units.append(unit)
        previous_units = [self._units[index] for index in range(unit.index) if index in self._units]
        if unit.list_index and any(
            previous.list_index == unit.list_index and not previous.is_within_next_unit for previous in previous_units
        ):
            return
        for finished_unit in self._finished_frozen_units:
            self._reshard_unit(device, finished_unit)
        self._finished_frozen_units.clear()

    def _accumulates_in_shard(self, unit: ShardingUnit) -> bool:
        """At factor 1 autograd adds a gradient to the one that was reduced before, or kept, and the sum is reduced
        (``_reduce_grad_no_shard`` in torch/distributed/fsdp/_runtime_utils.py)."""
        return self._sharding_factor == 1 and f"gradient shard {unit.index}" in self._gradient_shards

    def _reduce_gradients(self, device: PlanDevice, unit: ShardingUnit) -> None:
        index, flat_numel, gradient_itemsize = (
            unit.index,
            self._flat_numel[unit.index],
            self._find_compute_itemsize(unit),
        )
        reduce_itemsize, parameter_itemsize = self.inputs.reduce_itemsize, self.inputs.parameter_itemsize
        source_name, reduce_bytes = f"flat gradient {index}", flat_numel * reduce_itemsize
        if self._accumulates_in_shard(unit):
            source_name, gradient_itemsize = f"gradient shard {index}", parameter_itemsize
        if reduce_itemsize != gradient_itemsize:
            source_name = f"reduce input {index}"
            device.allocate(source_name, reduce_bytes, REDUCTION_MEMORY, stream=REDUCE_STREAM)
            device.copy_within_device(
                "to the format that is reduced", flat_numel * (reduce_itemsize + gradient_itemsize)
            )
        if self._sharding_factor > 1:
            result_name = f"reduced {index}"
            device.allocate(result_name, reduce_bytes / self._sharding_factor, REDUCTION_MEMORY, stream=REDUCE_STREAM)
            self._start_gradient_reduction(device, unit, reduce_bytes)
        else:
            result_name = source_name
            self._pending_events = [f"all-reduce {index}"]
            device.run_collective(
                self._pending_events[0], "all-reduce", reduce_bytes, WORLD_GROUP, REDUCE_STREAM, after="compute"
            )
            self._offload_gradient(device, unit)
        self._store_reduced_gradient(
            device,
            index,
            result_name,
            flat_numel // self._sharding_factor * parameter_itemsize,
            needs_cast=reduce_itemsize != parameter_itemsize,
        )
        device.free(f"reduce input {index}")  # made on the stream that uses it
        device.free(f"flat gradient {index}", after=REDUCE_STREAM)

    def _store_reduced_gradient(
        self, device: PlanDevice, index: int, result_name: str, size: float, *, needs_cast: bool
    ) -> None:
        """Keep what was reduced, in the format parameters are stored in, or add it to what is kept already."""
        shard_name = f"gradient shard {index}"
        if self._offloads_parameters:  # the CPU takes the result as it comes
            device.free(result_name)
            return
        if needs_cast:
            device.allocate(f"cast {index}", size, GRADIENT_MEMORY, stream=REDUCE_STREAM)
            device.free(result_name)
            result_name = f"cast {index}"
        if result_name == shard_name:  # reduced where it is
            return
        device.free(result_name)
        if shard_name in self._gradient_shards and self._sharding_factor > 1:
            device.copy_within_device("add gradient shard", 3 * size)
        if (
            shard_name not in self._gradient_shards or self._sharding_factor == 1
        ):  # what was added to is replaced, by the stream that made it
            device.free(shard_name)
            device.allocate(shard_name, size, GRADIENT_MEMORY, stream=REDUCE_STREAM)
            self._gradient_shards.add(shard_name)

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """The optimizer waits for the last unit's gradients."""
        for name in self._pending_events:
            device.wait_for_event(name)

    def _build_forward_order(self) -> dict[int, int]:
        """Per unit the one whose forward pass begins after its own: layers within a unit begin after it."""
        order, nested_layers = [-1], []
        for index, unit in self._units.items():
            if unit.is_within_next_unit:
                nested_layers.append(index)
            elif not unit.is_root:
                order += [index, *nested_layers]
                nested_layers = []
        return dict(pairwise(order))

    def _prefetch_next_backward_unit(self, device: PlanDevice, unit: ShardingUnit) -> None:
        next_unit = self._find_next_backward_unit(unit)
        if next_unit is not None:
            self._start_all_gather(device, next_unit)

    def _start_all_gather(self, device: PlanDevice, unit: ShardingUnit) -> None:
        index, size = unit.index, self._flat_numel[unit.index] * self._find_compute_itemsize(unit)
        if index in self._unsharded_units:
            return
        self._unsharded_units.add(index)
        device.run_hooks()
        self._upload_shard(device, unit, self.compute_shard_bytes(unit))
        if self._sharding_factor == 1:
            if self._offloads_parameters:
                self._pending_all_gathers.add(index)
            if self._casts_unit(unit):
                device.allocate(f"whole {index}", size, ALL_GATHER_MEMORY)
                device.copy_within_device("cast", size + self._flat_numel[index] * self.inputs.parameter_itemsize)
            return
        if self._casts_unit(unit):
            device.allocate(f"cast {index}", size / self._sharding_factor, ALL_GATHER_MEMORY, stream=CAST_STREAM)
        if self._strategy.limit_all_gathers:
            device.limit_all_gathers(MAX_ALL_GATHERS_IN_FLIGHT)
        device.allocate(f"whole {index}", size, ALL_GATHER_MEMORY, stream=ALL_GATHER_STREAM)
        device.run_collective(f"all-gather {index}", "all-gather", size, SHARD_GROUP, ALL_GATHER_STREAM)
        device.free(f"cast {index}", after=ALL_GATHER_STREAM)
        device.free(f"upload {index}", after=ALL_GATHER_STREAM)
        self._pending_all_gathers.add(index)

    def _wait_for_all_gather(self, device: PlanDevice, unit: ShardingUnit) -> None:
        if unit.index in self._pending_all_gathers:
            self._pending_all_gathers.discard(unit.index)
            device.wait_for_event(f"{'all-gather' if self._sharding_factor > 1 else 'upload'} {unit.index}")

    def _reshard_unit(self, device: PlanDevice, unit: ShardingUnit, *, stream: str = COMPUTE_STREAM) -> None:
        """Free the flat parameter, on the stream that used it last: its own, when its gradients are put together."""
        if unit.index in self._unsharded_units:
            self._unsharded_units.discard(unit.index)
            device.free(f"upload {unit.index}")
            device.free(f"whole {unit.index}", after=NCCL_STREAM if stream == ALL_GATHER_STREAM else stream)
            device.note_late_free(after=stream)
