"""FSDP1: `FullyShardedDataParallel`, one flat parameter per unit. What the paper measured."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
)
from torch.distributed.fsdp import ShardingStrategy as FSDP1Sharding
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from bench.core.errors import ImpossibleError
from bench.core.presentation import FactorLine, Presentation, TrainingTerm
from bench.core.typed_config import OneOf
from bench.models.blocks import find_trained_layers, group_blocks
from bench.optimizers import UpdatedTensor
from bench.optimizers.updated_tensor import FLAT_TENSORS, WHOLE_TENSORS
from bench.strategies.base import StepSettings, WrapContext
from bench.strategies.sharding import ShardedPlan, ShardingStrategy
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    ALL_GATHER_STREAM,
    GRADIENT_MEMORY,
    GRADIENTS_KEPT,
    REDUCE_STREAM,
    REDUCTION_MEMORY,
    SHARD_GROUP,
    WORLD_GROUP,
    ParameterSpec,
    PlanDevice,
    PlanInputs,
    ShardingUnit,
    StepPlan,
    name_unit_gradients,
)

BACKWARD_PREFETCH_MODES = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


@dataclass(frozen=True)
class FSDP1Strategy(ShardingStrategy):
    """FSDP1. At factor 1 it is NO_SHARD, the paper's full replication."""

    presentation = Presentation(
        label="FSDP1",
        position=40,
        kinds={
            "no_shard": ("no shard", "#f0c05a"),
            "full_replication": ("full replication", ""),
            "hybrid_shard": ("hybrid", "#6cc5a8"),
            "hybrid_shard_grad_op": ("hybrid shard grad op", "#a9c76c"),
            "shard_grad_op": ("shard grad op", "#e3a6c6"),
            "full_shard": ("full shard", "#cc79a7"),
            "unsharded": ("unsharded", ""),
        },
        is_sharded_by_factor=True,
        factor_line=FactorLine("s", kind="full_shard", offset_log2=0.06),
    )
    training_terms = (
        TrainingTerm(
            "ZeRO-2, sharded DDP, SHARD_GRAD_OP",
            ("strategy=zero2_fsdp1",),
            "gradients are to be divided too, and whole parameters fit",
            divides=("gradients", "optimizer state"),
        ),
        TrainingTerm(
            "ZeRO-3, FSDP FULL_SHARD",
            ("strategy=fsdp1",),
            "a copy does not fit, the largest layer does",
            divides=("parameters", "gradients", "optimizer state"),
        ),
    )

    backward_prefetch: Annotated[str, OneOf(*BACKWARD_PREFETCH_MODES)]
    """When to gather the next unit in backward: pre (before the current unit's computation), post or none."""
    limit_all_gathers: bool
    """The rate limiter: at most two all-gathers in flight."""

    has_autocast_cache = False
    shards_trained_layers_separately = True

    @property
    def updated_tensor_kind(self) -> str:
        return WHOLE_TENSORS if self.resolved_sharding_factor == 1 else FLAT_TENSORS

    def check_step(self, settings: StepSettings) -> None:
        """What is not sharded cannot accumulate gradients of parameters that were cast: torch 2.13 puts the first
        micro-batch's, in 16 bits, in the place of those of the parameters in fp32, and fails."""
        if settings.finetune != "full" and self.resolved_sharding_factor == 1:
            raise ImpossibleError(
                f"strategy.sharding_factor=1 is not valid for strategy={self.name} with finetune={settings.finetune}: "
                "torch's FSDP1 fails there with frozen parameters that are tied: choose full, or strategy ddp or fsdp."
            )
        if settings.finetune != "full" and settings.precision.scales_loss:
            raise ImpossibleError(
                f"precision={settings.precision.name} is not valid for strategy={self.name} with "
                f"finetune={settings.finetune}, where layers that stay in fp32 would hold adapters that are sharded by "
                "themselves: choose bf16, or strategy fsdp."
            )
        casts_parameters = settings.precision.is_mixed and not self.uses_autocast(settings.precision)
        if settings.finetune == "qlora" and casts_parameters:
            raise ImpossibleError(
                f"precision={settings.precision.name} is not valid for strategy={self.name} with finetune=qlora, since "
                "torch's FSDP1 keeps the parameters of a block in one flat parameter and would cast packed weights "
                "with it: choose bf16_pure, precision.mixing=autocast, or strategy fsdp."
            )
        if (
            self.resolved_sharding_factor == 1
            and casts_parameters
            and settings.num_micro_batches > 1
            and not settings.synchronize_every_micro_batch
        ):
            raise ImpossibleError(
                f"gradient_accumulation_sync=false is not valid for strategy={self.name}, where nothing is sharded, "
                f"with precision={settings.precision.name} and precision.mixing=parameters, whose gradients torch's "
                "FSDP1 "
                "cannot keep from one micro-batch to the next: choose true, or strategy fsdp1 with "
                "precision.mixing=autocast, or strategy fsdp."
            )

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Wrap each unit, then the root; every unit is filled just before it is sharded."""
        casts_parameters = context.precision.is_mixed and not self.uses_autocast(context.precision)
        fp32_layers = (
            set(context.family.find_fp32_modules(model))
            if context.precision.scales_loss and casts_parameters
            else set()
        )
        mixed_precision = MixedPrecision(
            param_dtype=context.precision.compute_dtype if casts_parameters else None,
            reduce_dtype=context.precision.reduce_dtype,
            cast_forward_inputs=casts_parameters and not fp32_layers,
        )
        fp32_precision = MixedPrecision(reduce_dtype=context.precision.reduce_dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {
            **self._build_sharding_options(context),
            "device_id": context.device,
            # The first shard of a flat parameter is its beginning, which may be a layer norm's ones and zeros.
            "param_init_fn": partial(
                context.materializer.fill_module,
                constants=not context.is_rehearsed or self.resolved_sharding_factor == 1,
            ),
            "cpu_offload": CPUOffload(offload_params=True) if self.cpu_offload else None,
            "backward_prefetch": BACKWARD_PREFETCH_MODES[self.backward_prefetch],
            "forward_prefetch": self.forward_prefetch,
            "limit_all_gathers": self.limit_all_gathers,
            "use_orig_params": True,
        }
        # Autograd computes gradients of a whole flat parameter: what is trained beside frozen parameters has its own.
        trained_layers = set(find_trained_layers(context.family, model))
        for module in model.modules() if trained_layers else ():
            if hasattr(module, "cast_input_dtype_enabled"):  # peft would look at weights before they are gathered
                module.cast_input_dtype_enabled = False  # type: ignore[assignment]
        group_blocks(context.family, model, self.blocks_per_unit)
        with warnings.catch_warnings():
            # NO_SHARD is deprecated in favour of DDP, but it is what the paper compares.
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
            for blocks in context.family.find_block_lists(model):
                for index, unit in enumerate(blocks):
                    for parent, name in _find_parents(unit, fp32_layers):
                        child = FullyShardedDataParallel(
                            getattr(parent, name), mixed_precision=fp32_precision, **options
                        )
                        setattr(parent, name, child)
                    for parent, name in _find_parents(unit, trained_layers):
                        child = FullyShardedDataParallel(
                            getattr(parent, name), mixed_precision=mixed_precision, **options
                        )
                        setattr(parent, name, child)
                    blocks[index] = FullyShardedDataParallel(unit, mixed_precision=mixed_precision, **options)
            return FullyShardedDataParallel(model, mixed_precision=mixed_precision, **options)

    def describe_effective_strategy(self, world_size: int) -> str:
        """FSDP1 calls an unsharded model NO_SHARD."""
        return (
            f"{self.name}/no_shard"
            if self.resolved_sharding_factor == 1
            else super().describe_effective_strategy(world_size)
        )

    def _build_sharding_options(self, context: WrapContext) -> dict[str, Any]:
        reshards = self.reshard_after_forward
        if self.resolved_sharding_factor == 1:
            return {"sharding_strategy": FSDP1Sharding.NO_SHARD}
        if self.resolved_sharding_factor == context.world_size:
            return {"sharding_strategy": FSDP1Sharding.FULL_SHARD if reshards else FSDP1Sharding.SHARD_GRAD_OP}
        return {
            "sharding_strategy": FSDP1Sharding.HYBRID_SHARD if reshards else FSDP1Sharding._HYBRID_SHARD_ZERO2,
            "device_mesh": self.build_mesh(context),
        }

    @contextlib.contextmanager
    def control_gradient_sync(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation every rank keeps whole, unsharded gradients until the next reduce-scatter."""
        assert isinstance(wrapped, FullyShardedDataParallel)
        with contextlib.nullcontext() if synchronize else wrapped.no_sync():
            yield

    def build_grad_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """A scaler that agrees across shards whether a step overflowed."""
        return ShardedGradScaler(device.type)

    def clip_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """By its own method: gradients are parts of flat ones, whose norm torch's function would take rank by rank."""
        assert isinstance(module, FullyShardedDataParallel)
        module.clip_grad_norm_(max_norm)

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """One flat parameter per unit, cut into shards."""
        return FSDP1Plan(self, inputs)


MAX_ALL_GATHERS_IN_FLIGHT = 2
"""All-gathers the rate limiter lets be in flight (``_FreeEventQueue`` in torch 2.13)."""

ALIGNMENT_BYTES = 16


class FSDP1Plan(ShardedPlan):
    """What `FullyShardedDataParallel` does with ``use_orig_params``, read in torch 2.13 (``torch/distributed/fsdp``).

    A unit's parameters lie one behind the other in a flat parameter, each aligned to 16 bytes, padded to a multiple of
    F. An all-gather writes into the flat parameter itself. Gradients are put together into a flat one.
    At factor 1 (NO_SHARD) nothing is gathered: whole parameters are cast, if at all, and gradients all-reduced.
    """

    def __init__(self, strategy: FSDP1Strategy, inputs: PlanInputs) -> None:
        super().__init__(strategy, inputs)
        self._strategy = strategy
        self._flat_numel = {index: self._compute_flat_numel(unit) for index, unit in self._units.items()}
        self._next_forward_unit = self._build_forward_order()
        next_prefetched = self._next_forward_unit if strategy.forward_prefetch else {}
        self._prefetched_by = {next_index: index for index, next_index in next_prefetched.items()}
        self._delayed_units: dict[int, ShardingUnit] = {}
        self._pending_all_gathers: set[int] = set()
        self._kept_flat_gradients: set[str] = set()
        self._finished_frozen_units: list[ShardingUnit] = []

    def _compute_flat_numel(self, unit: ShardingUnit) -> int:
        """Elements of the flat parameter."""
        aligned_numel = ALIGNMENT_BYTES // self._find_compute_itemsize(unit)
        total = 0
        for parameter in unit.parameters:
            total = -(-total // aligned_numel) * aligned_numel + parameter.numel
        return -(-total // self._sharding_factor) * self._sharding_factor

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
            return [parameter.build_updated_tensor() for parameter in self.inputs.trained_parameters]
        part_numels = {}
        for unit_position, (index, unit) in enumerate(self._units.items()):
            aligned_numel = ALIGNMENT_BYTES // self._find_compute_itemsize(unit)
            shard, offset = self._flat_numel[index] // self._sharding_factor, 0
            for parameter_position, parameter in enumerate(unit.parameters):
                offset = -(-offset // aligned_numel) * aligned_numel
                part_numels[unit_position, parameter_position] = max(0, min(shard, offset + parameter.numel) - offset)
                offset += parameter.numel
        return [
            UpdatedTensor((part_numels[unit_position, position],))
            for unit_position, position in self.inputs.parameter_order
            if self.inputs.units[unit_position].parameters[position].is_trained
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
        device.allocate(name, size, GRADIENT_MEMORY)
        device.copy_within_device("flat gradient", 2 * size)
        device.free(name_unit_gradients(unit))
        if (
            self._accumulates_in_shard(unit)
            and self.inputs.is_on_cpu
            and self._find_compute_itemsize(unit) != parameter_itemsize
        ):
            device.allocate(
                "converted gradient", flat_numel * parameter_itemsize, GRADIENT_MEMORY
            )  # to the format of what it is added to
            device.free("converted gradient")
        self._reshard_unit(device, unit)
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
            device.allocate(f"cast {index}", size / self._sharding_factor, ALL_GATHER_MEMORY, stream=ALL_GATHER_STREAM)
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

    def _reshard_unit(self, device: PlanDevice, unit: ShardingUnit) -> None:
        if unit.index in self._unsharded_units:
            self._unsharded_units.discard(unit.index)
            device.free(f"upload {unit.index}")
            device.free(f"whole {unit.index}", after="compute")
            device.note_late_free()


def _find_parents(unit: nn.Module, children: set[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Where in `unit` the given modules hang: parent and attribute name."""
    return [(parent, name) for parent in unit.modules() for name, child in parent.named_children() if child in children]
