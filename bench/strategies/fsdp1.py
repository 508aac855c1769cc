"""FSDP1: `FullyShardedDataParallel`, one flat parameter per unit. What the paper measured."""

from __future__ import annotations

import contextlib
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

from bench.errors import ImpossibleError
from bench.models.blocks import group_blocks
from bench.strategies.base import Job, Step, that_train
from bench.strategies.plan import (
    GATHER,
    GATHERED,
    GRADIENTS,
    REDUCE,
    REDUCED,
    SHARDS,
    STAY,
    WORLD,
    Device,
    Parameter,
    Plan,
    Setting,
    Unit,
    gradients_of,
)
from bench.strategies.sharding import ShardedPlan, ShardingStrategy
from bench.typed import OneOf

BACKWARD_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


@dataclass(frozen=True)
class FSDP1(ShardingStrategy):
    """FSDP1. At factor 1 it is NO_SHARD, the paper's full replication."""

    backward_prefetch: Annotated[str, OneOf(*BACKWARD_PREFETCH)]
    """When to gather the next unit in backward: pre (before the current unit's computation), post or none."""
    limit_all_gathers: bool
    """The rate limiter: at most two all-gathers in flight."""

    finetunes = ("full",)
    autocast_caches = False

    def check_finetune(self, name: str) -> None:
        """The parameters of a unit are views of one flat parameter: autograd computes gradients of all or of none."""
        if name == "lora":
            raise ImpossibleError(
                "finetune=lora is not valid with strategy=fsdp1, which computes gradients of all parameters of a "
                "unit as soon as one of them is trained, so that freezing the others would save nothing: choose "
                f"strategy {that_train(name)}."
            )
        super().check_finetune(name)

    def check_step(self, step: Step) -> None:
        """What is not sharded cannot accumulate gradients of parameters that were cast: torch 2.13 puts the first
        micro-batch's, in 16 bits, in the place of those of the parameters in fp32, and fails."""
        casts = step.precision.mixed and not self.uses_autocast(step.precision)
        if self.factor == 1 and casts and step.micro_batches > 1 and not step.synchronize_every_micro_batch:
            raise ImpossibleError(
                f"gradient_accumulation_sync=false is not valid for strategy={self.name}, where nothing is sharded, "
                f"with precision={step.precision.name} and precision.mixing=parameters, whose gradients torch's FSDP1 "
                "cannot keep from one micro-batch to the next: choose true, or strategy fsdp1 with "
                "precision.mixing=autocast, or strategy fsdp."
            )

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Wrap each unit, then the root; every unit is filled just before it is sharded."""
        casts = job.precision.mixed and not self.uses_autocast(job.precision)
        keep_fp32 = set(job.family.fp32_modules(model)) if job.precision.scales_loss and casts else set()
        mixed = MixedPrecision(
            param_dtype=job.precision.compute_dtype if casts else None,
            reduce_dtype=job.precision.reduce_dtype,
            cast_forward_inputs=casts and not keep_fp32,
        )
        unmixed = MixedPrecision(reduce_dtype=job.precision.reduce_dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {
            **self._group(job),
            "device_id": job.device,
            # The first shard of a flat parameter is its beginning, which may be a layer norm's ones and zeros.
            "param_init_fn": partial(job.materializer.module, constants=not job.rehearsed or self.factor == 1),
            "cpu_offload": CPUOffload(offload_params=True) if self.cpu_offload else None,
            "backward_prefetch": BACKWARD_PREFETCH[self.backward_prefetch],
            "forward_prefetch": self.forward_prefetch,
            "limit_all_gathers": self.limit_all_gathers,
            "use_orig_params": True,
        }
        group_blocks(job.family, model, self.blocks_per_unit)
        with warnings.catch_warnings():
            # NO_SHARD is deprecated in favour of DDP, but it is what the paper compares.
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
            for blocks in job.family.block_lists(model):
                for index, unit in enumerate(blocks):
                    for parent, name in _parents(unit, keep_fp32):
                        child = FullyShardedDataParallel(getattr(parent, name), mixed_precision=unmixed, **options)
                        setattr(parent, name, child)
                    blocks[index] = FullyShardedDataParallel(unit, mixed_precision=mixed, **options)
            return FullyShardedDataParallel(model, mixed_precision=mixed, **options)

    def effective(self, world_size: int) -> str:
        """FSDP1 calls an unsharded model NO_SHARD."""
        return f"{self.name}/no_shard" if self.factor == 1 else super().effective(world_size)

    def _group(self, job: Job) -> dict[str, Any]:
        reshard = self.reshard_after_forward
        if self.factor == 1:
            return {"sharding_strategy": FSDP1Sharding.NO_SHARD}
        if self.factor == job.world_size:
            return {"sharding_strategy": FSDP1Sharding.FULL_SHARD if reshard else FSDP1Sharding.SHARD_GRAD_OP}
        return {
            "sharding_strategy": FSDP1Sharding.HYBRID_SHARD if reshard else FSDP1Sharding._HYBRID_SHARD_ZERO2,
            "device_mesh": self.mesh(job),
        }

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation every rank keeps whole, unsharded gradients until the next reduce-scatter."""
        assert isinstance(wrapped, FullyShardedDataParallel)
        with contextlib.nullcontext() if synchronize else wrapped.no_sync():
            yield

    def grad_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """A scaler that agrees across shards whether a step overflowed."""
        return ShardedGradScaler(device.type)

    def plan(self, setting: Setting) -> Plan:
        """One flat parameter per unit, cut into shards."""
        return FSDP1Plan(self, setting)


MOST_GATHERS = 2
"""All-gathers the rate limiter lets be in flight (``_FreeEventQueue`` in torch 2.13)."""

ALIGNMENT_BYTES = 16


class FSDP1Plan(ShardedPlan):
    """What `FullyShardedDataParallel` does with ``use_orig_params``, read in torch 2.13 (``torch/distributed/fsdp``).

    A unit's parameters lie one behind the other in a flat parameter, each aligned to 16 bytes, padded to a multiple of
    F. An all-gather writes into the flat parameter itself. Gradients are put together into a flat one.
    At factor 1 (NO_SHARD) nothing is gathered: whole parameters are cast, if at all, and gradients all-reduced.
    """

    def __init__(self, strategy: FSDP1, setting: Setting) -> None:
        super().__init__(strategy, setting)
        self._strategy = strategy
        self._flat = {index: self._numel(unit) for index, unit in self._units.items()}
        self._forward_order = self._in_forward_order()
        prefetched = self._forward_order if strategy.forward_prefetch else {}
        self._prefetched_by = {following: index for index, following in prefetched.items()}
        self._late: dict[int, Unit] = {}
        self._waiting: set[int] = set()
        self._kept: set[str] = set()

    def _numel(self, unit: Unit) -> int:
        """Elements of the flat parameter."""
        aligned = ALIGNMENT_BYTES // self._compute_bytes(unit)
        total = 0
        for parameter in unit.parameters:
            total = -(-total // aligned) * aligned + parameter.numel
        return -(-total // self._factor) * self._factor

    def shard_numel(self, unit: Unit) -> int:
        """Of its flat parameter, padding included."""
        return self._flat[unit.index] // self._factor

    def gradient_numel(self, unit: Unit) -> int:
        """Of its flat parameter."""
        return self.shard_numel(unit)

    @property
    def updated(self) -> Sequence[int]:
        """The first rank's part of every parameter: those at the beginning of each unit, wholly or not at all."""
        parts = {}
        for position, (index, unit) in enumerate(self._units.items()):
            aligned = ALIGNMENT_BYTES // self._compute_bytes(unit)
            shard, offset = self._flat[index] // self._factor, 0
            for own, parameter in enumerate(unit.parameters):
                offset = -(-offset // aligned) * aligned
                parts[position, own] = max(0, min(shard, offset + parameter.numel) - offset)
                offset += parameter.numel
        return [parts[place] for place in self.setting.in_model_order]

    def before_forward(self, device: Device, unit: Unit) -> None:
        """Gather the unit, with prefetching the next one too."""
        self._gather(device, unit)
        self._await(device, unit)
        following = self._forward_order.get(unit.index)
        if self._strategy.forward_prefetch and following is not None:
            self._gather(device, self._units[following])

    def after_forward(self, device: Device, unit: Unit) -> None:
        """Free the flat parameter, but not the root's, which backward needs at once."""
        device.hooks(0.5)
        if self._factor == 1 or (self._strategy.reshard_after_forward and not unit.is_root):
            self._reshard(device, unit)

    def before_backward(self, device: Device, unit: Unit) -> None:
        """Gather the unit again, and, prefetching early, the one before it."""
        self._gather(device, unit)
        self._await(device, unit)
        if self._strategy.backward_prefetch == "pre":
            self._prefetch_previous(device, unit)

    def gradient_bytes(self, parameter: Parameter) -> int:
        """In the format it is computed in."""
        return parameter.numel * self.setting.compute_bytes(parameter)

    def gradients(self, unit: Unit) -> str:
        """By themselves, until all of the unit's are there."""
        return STAY

    def after_backward(self, device: Device, unit: Unit) -> None:
        """Its gradients are put together; with forward prefetching only when the unit that prefetched it is done.

        Its parameters became views of the flat one when they were prefetched, before that unit ran, and autograd goes
        backward in the opposite order.
        """
        late = self._late.pop(unit.index, None)
        if late is not None:
            self._put_together(device, late)
        prefetched_by = self._prefetched_by.get(unit.index)
        if prefetched_by is None:
            self._put_together(device, unit)
        else:
            self._late[prefetched_by] = unit

    def _put_together(self, device: Device, unit: Unit) -> None:
        """Free the flat parameter, then reduce or keep the flat gradient."""
        device.hooks()
        index, flat, parameter_bytes = unit.index, self._flat[unit.index], self.setting.parameter_bytes
        size = flat * self._compute_bytes(unit)
        accumulated = f"flat gradient {index}" in self._kept or self._adds_to_shard(unit)
        name = "added gradient" if accumulated else f"flat gradient {index}"
        device.hold(name, size, GRADIENTS)
        device.copy("flat gradient", 2 * size)
        device.release(gradients_of(unit))
        if self._adds_to_shard(unit) and self.setting.on_cpu and self._compute_bytes(unit) != parameter_bytes:
            device.hold("converted gradient", flat * parameter_bytes, GRADIENTS)  # to the format of what it is added to
            device.release("converted gradient")
        self._reshard(device, unit)
        if self._strategy.backward_prefetch == "post" and not unit.is_root:
            self._prefetch_previous(device, unit)
        if self._synchronize:
            self._kept.discard(f"flat gradient {index}")
            self._reduce(device, unit)
        elif not accumulated:
            self._kept.add(f"flat gradient {index}")
        if accumulated:  # autograd holds it until its hooks have run
            device.release(name)

    def _adds_to_shard(self, unit: Unit) -> bool:
        """At factor 1 autograd adds a gradient to the one that was reduced before, or kept, and the sum is reduced
        (``_reduce_grad_no_shard`` in torch/distributed/fsdp/_runtime_utils.py)."""
        return self._factor == 1 and f"gradient shard {unit.index}" in self._shards

    def _reduce(self, device: Device, unit: Unit) -> None:
        index, flat, added_bytes = unit.index, self._flat[unit.index], self._compute_bytes(unit)
        reduce_bytes, parameter_bytes = self.setting.reduce_bytes, self.setting.parameter_bytes
        source, whole = f"flat gradient {index}", flat * reduce_bytes
        if self._adds_to_shard(unit):
            source, added_bytes = f"gradient shard {index}", parameter_bytes
        if reduce_bytes != added_bytes:
            source = f"reduce input {index}"
            device.hold(source, whole, REDUCED)
            device.copy("to the format that is reduced", flat * (reduce_bytes + added_bytes))
        if self._factor > 1:
            result = f"reduced {index}"
            device.hold(result, whole / self._factor, REDUCED)
            self._send_gradients(device, unit, whole)
        else:
            result = source
            self._sent = [f"all-reduce {index}"]
            device.send(self._sent[0], "all-reduce", whole, WORLD, REDUCE, after="compute")
            self._send_out(device, unit)
        self._store(device, index, result, flat // self._factor * parameter_bytes, cast=reduce_bytes != parameter_bytes)
        device.release(f"reduce input {index}")  # made on the stream that uses it
        device.release(f"flat gradient {index}", after=REDUCE)

    def _store(self, device: Device, index: int, result: str, size: float, *, cast: bool) -> None:
        """Keep what was reduced, in the format parameters are stored in, or add it to what is kept already."""
        shard = f"gradient shard {index}"
        if self._offloads:  # the CPU takes the result as it comes
            device.release(result)
            return
        if cast:
            device.hold(f"cast {index}", size, GRADIENTS)
            device.release(result)
            result = f"cast {index}"
        if result == shard:  # reduced where it is
            return
        device.release(result)
        if shard not in self._shards or self._factor == 1:  # what was added to is replaced, by the stream that made it
            device.release(shard)
            device.hold(shard, size, GRADIENTS)
            self._shards.add(shard)

    def after_step_backward(self, device: Device) -> None:
        """The optimizer waits for the last unit's gradients."""
        for name in self._sent:
            device.wait(name)

    def _in_forward_order(self) -> dict[int, int]:
        """Per unit the one whose forward pass begins after its own: layers within a unit begin after it."""
        order, within = [-1], []
        for index, unit in self._units.items():
            if unit.within_next:
                within.append(index)
            elif not unit.is_root:
                order += [index, *within]
                within = []
        return dict(pairwise(order))

    def _prefetch_previous(self, device: Device, unit: Unit) -> None:
        previous = self._previous(unit)
        if previous is not None:
            self._gather(device, previous)

    def _gather(self, device: Device, unit: Unit) -> None:
        index, size = unit.index, self._flat[unit.index] * self._compute_bytes(unit)
        if index in self._whole:
            return
        self._whole.add(index)
        device.hooks()
        self._upload(device, unit, self.shard_numel(unit) * self.setting.parameter_bytes)
        if self._factor == 1:
            if self._offloads:
                self._waiting.add(index)
            if self._casts(unit):
                device.hold(f"whole {index}", size, GATHERED)
                device.copy("cast", size + self._flat[index] * self.setting.parameter_bytes)
            return
        if self._casts(unit):
            device.hold(f"cast {index}", size / self._factor, GATHERED)
        if self._strategy.limit_all_gathers:
            device.throttle(MOST_GATHERS)
        device.hold(f"whole {index}", size, GATHERED)
        device.send(f"all-gather {index}", "all-gather", size, SHARDS, GATHER)
        device.release(f"cast {index}", after=GATHER)
        device.release(f"upload {index}", after=GATHER)
        self._waiting.add(index)

    def _await(self, device: Device, unit: Unit) -> None:
        if unit.index in self._waiting:
            self._waiting.discard(unit.index)
            device.wait(f"{'all-gather' if self._factor > 1 else 'upload'} {unit.index}")

    def _reshard(self, device: Device, unit: Unit) -> None:
        if unit.index in self._whole:
            self._whole.discard(unit.index)
            device.release(f"upload {unit.index}")
            device.release(f"whole {unit.index}", after="compute")
            device.note_release()


def _parents(unit: nn.Module, children: set[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Where in `unit` the given modules hang: parent and attribute name."""
    return [(parent, name) for parent in unit.modules() for name, child in parent.named_children() if child in children]
