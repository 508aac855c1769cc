"""FSDP2: `fully_shard`, parameters as DTensors sharded on their first dimension."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bench.errors import ImpossibleError
from bench.models.blocks import group_blocks
from bench.strategies.base import BuildOptimizer, Job, Strategy
from bench.strategies.plan import (
    ADDED,
    GATHER,
    GATHERED,
    GRADIENTS,
    REDUCED,
    SHARDS,
    STAY,
    Device,
    Parameter,
    Plan,
    Setting,
    Unit,
    gradients_of,
    hold_copied_in,
)
from bench.strategies.sharding import ShardedPlan, ShardingStrategy
from bench.strategies.uploading import UploadingOptimizer


@dataclass(frozen=True)
class FSDP2(ShardingStrategy):
    """FSDP2. It has no all-gather rate limiter: memory is bounded by the order of its streams instead."""

    backward_prefetch: bool
    """Issue the next unit's all-gather before the current unit's backward."""
    optimizer_on_device: bool = False
    """With `cpu_offload`: keep optimizer state and the optimizer's step on the device."""
    mesh_2d: bool = False
    """Shard on a mesh of two dimensions, replicas and shards, even where there is one replica: each gradient is then
    all-reduced within a group of one rank. With several replicas the mesh always has both."""

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy, and `mesh_2d` as the mesh will be."""
        resolved = super().resolve(world_size, ranks_per_node, accumulates=accumulates)
        assert isinstance(resolved, FSDP2)
        return dataclasses.replace(resolved, mesh_2d=resolved.has_replicas(world_size))

    def has_replicas(self, world_size: int) -> bool:
        """Where there are several, or it was asked for."""
        return self.mesh_2d or super().has_replicas(world_size)

    @property
    def updates_on_host(self) -> bool:
        """Unless the optimizer stays on the device."""
        return self.cpu_offload and not self.optimizer_on_device

    @property
    def reduces_on_host(self) -> bool:
        """Of gradients that were offloaded: whether one is no finite number anywhere, which loss scaling asks for."""
        return self.cpu_offload

    def check(self, world_size: int) -> None:
        """As every sharding strategy; the optimizer can stay alone only where something has left."""
        super().check(world_size)
        if self.optimizer_on_device and not self.cpu_offload:
            raise ImpossibleError(
                "strategy.optimizer_on_device=true is not valid with strategy.cpu_offload=false, where nothing has "
                "left the device: choose false, or strategy.cpu_offload=true."
            )

    def check_optimizer(self, name: str, implementation: str) -> None:
        """torch 2.13 has no fused SGD on DTensors."""
        if (name, implementation) == ("sgd", "fused"):
            raise ImpossibleError(
                "optimizer.implementation=fused is not valid for optimizer=sgd with strategy=fsdp, whose parameters "
                "are DTensors: choose foreach or for_loop, or strategy fsdp1."
            )

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Shard each unit, then the root with what is left (the shared embedding among it), then fill the shards."""
        casts = job.precision.mixed and not self.uses_autocast(job.precision)
        keep_fp32 = list(job.family.fp32_modules(model)) if job.precision.scales_loss and casts else []
        options: dict[str, Any] = {
            "mesh": self.mesh(job),
            "offload_policy": CPUOffloadPolicy(pin_memory=job.device.type != "cpu")
            if self.cpu_offload
            else OffloadPolicy(),
        }
        policy = MixedPrecisionPolicy(
            param_dtype=job.precision.compute_dtype if casts else None,
            reduce_dtype=job.precision.reduce_dtype,
            cast_forward_inputs=not keep_fp32,
        )
        full = MixedPrecisionPolicy(reduce_dtype=job.precision.reduce_dtype)
        layers: list[FSDPModule] = [
            fully_shard(layer, mp_policy=full, reshard_after_forward=self.reshard_after_forward, **options)
            for layer in keep_fp32
        ]
        units: list[FSDPModule] = [
            fully_shard(unit, mp_policy=policy, reshard_after_forward=self.reshard_after_forward, **options)
            for unit in group_blocks(job.family, model, self.blocks_per_unit)
        ]
        # The root is needed again as soon as backward starts, so it is never resharded after forward.
        fully_shard(model, mp_policy=policy, reshard_after_forward=False, **options)
        self._set_prefetch(units, layers)
        job.materializer.model(model, keep_on_cpu=self.cpu_offload)
        return model

    def _set_prefetch(self, units: Sequence[FSDPModule], layers: Sequence[FSDPModule]) -> None:
        """Between units; layers within them, which are sharded by themselves, are gathered as they are needed."""
        if self.forward_prefetch:
            for unit, following in pairwise(units):
                unit.set_modules_to_forward_prefetch([following])
        if not self.backward_prefetch:
            for unit in (*units, *layers):
                # FSDP2 prefetches by itself unless it is told what to prefetch; a unit is already there for itself.
                unit.set_modules_to_backward_prefetch([unit])

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation every rank keeps whole, unsharded gradients until the next reduce-scatter."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(synchronize)
        yield

    def optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """Over the shards, wherever they are; or, if they alone are on the CPU, one that updates them on the device."""
        if self.optimizer_on_device:
            parameters = list(module.parameters())
            assert isinstance(parameters[0], DTensor)
            return UploadingOptimizer(parameters, build, torch.device(parameters[0].device_mesh.device_type))
        return super().optimizer(module, build)

    def plan(self, setting: Setting) -> Plan:
        """Shards of every parameter, gathered unit by unit."""
        return FSDP2Plan(self, setting)


class FSDP2Plan(ShardedPlan):
    """What `fully_shard` does, read in torch 2.13 (``torch/distributed/fsdp/_fully_shard``).

    Each parameter is cut along its first dimension into F shards of equal size, the last ones padded. An all-gather
    arrives in one buffer and is then copied out into whole parameters. Gradients are copied into one buffer, in the
    format they are reduced in, and reduce-scattered. Where the mesh has replicas an all-reduce among them follows, and
    what it reduced is kept until backward is over.
    """

    def __init__(self, strategy: FSDP2, setting: Setting) -> None:
        super().__init__(strategy, setting)
        self._strategy = strategy
        self._accumulated: set[int] = set()
        self._gathering: set[int] = set()
        self._buffer: str | None = None
        self._reduce_input: int | None = None
        self._sizes = {index: self._size(unit) for index, unit in self._units.items()}

    def _size(self, unit: Unit) -> _Sizes:
        """Elements and bytes of a unit, whole (padded) and on this rank."""
        local = [parameter.first_shard(self._factor) for parameter in unit.parameters]
        computed = [
            numel * self.setting.compute_bytes(parameter)
            for numel, parameter in zip(local, unit.parameters, strict=True)
        ]
        trained = [(each.first_shard(self._factor), self.setting.compute_bytes(each)) for each in unit.trained]
        return _Sizes(
            sum(local),
            sum(computed),
            _cast_in_turn(computed) if self._casts(unit) else 0,
            sum(numel for numel, _ in trained),
            sum(numel * size for numel, size in trained),
        )

    def shard_numel(self, unit: Unit) -> int:
        """Of all its parameters' shards."""
        return self._sizes[unit.index].numel

    def gradient_numel(self, unit: Unit) -> int:
        """Of the shards of those that are trained."""
        return self._sizes[unit.index].trained

    @property
    def updated(self) -> Sequence[int]:
        """The first rank's shards, which are never smaller than the others'."""
        return [parameter.first_shard(self._factor) for parameter in self.setting.trained]

    def before_forward(self, device: Device, unit: Unit) -> None:
        """Gather the unit; its buffer stays until the next one's parameters are copied out."""
        self._gather(device, unit)
        self._copy_out(device, unit, forward=True)
        following = self._following(unit)
        if self._strategy.forward_prefetch and following is not None:
            self._gather(device, following)

    def _following(self, unit: Unit) -> Unit | None:
        """The unit after one of blocks: layers within one are not prefetched, and prefetch nothing."""
        if unit.is_root or unit.within_next:
            return None
        after = (self._units[index] for index in range(unit.index + 1, self._last + 1))
        return next((each for each in after if not each.within_next), None)

    def _recasts(self, unit: Unit) -> bool:
        """Whether gradients are reduced in another format than they are computed in."""
        return self.setting.reduce_bytes != self._compute_bytes(unit)

    def after_forward(self, device: Device, unit: Unit) -> None:
        """Free the whole parameters, but not the root's, which backward needs at once."""
        device.hooks(0.5)
        if unit.is_root:
            self._drop_buffer(device)
        elif self._strategy.reshard_after_forward:
            self._reshard(device, unit)

    def before_backward(self, device: Device, unit: Unit) -> None:
        """Gather the unit again, and start with the one before it."""
        self._gather(device, unit)
        self._copy_out(device, unit, forward=False)
        previous = self._previous(unit)
        if previous is not None and (self._strategy.backward_prefetch or unit.is_root):
            self._gather(device, previous)

    def gradient_bytes(self, parameter: Parameter) -> int:
        """In the format it is computed in."""
        return parameter.numel * self.setting.compute_bytes(parameter)

    def gradients(self, unit: Unit) -> str:
        """Whole until the unit's backward is over."""
        return ADDED if unit.index in self._accumulated and not self._recasts(unit) else STAY

    def after_backward(self, device: Device, unit: Unit) -> None:
        """Free the whole parameters, then reduce the gradients or keep them for the next micro-batch."""
        device.hooks()
        summed = unit.index in self._accumulated and self._recasts(unit)
        if summed:
            self._add(device, unit)
        self._reshard(device, unit)
        if not self._synchronize:
            if self._recasts(unit) and not summed:
                self._recast(device, unit)
            self._accumulated.add(unit.index)
            return
        self._accumulated.discard(unit.index)
        sizes = self._sizes[unit.index]
        if not sizes.trained:
            return
        if self._reduce_input is not None:
            # One unit's input at a time: this unit's waits until the one before it is reduced.
            device.wait(f"reduce-scatter {self._reduce_input}")
            device.release(f"reduce input {self._reduce_input}")
        whole = sizes.trained * self._factor * self.setting.reduce_bytes
        device.hold(f"reduce input {unit.index}", whole, REDUCED)
        if self.setting.on_cpu:
            itemsize = self.setting.reduce_bytes if summed else self._compute_bytes(unit)
            hold_copied_in(device, unit, self._factor, itemsize, self.setting.reduce_bytes)
        device.copy("reduce input", sizes.gradients * self._factor + whole)
        self._release_gradients(device, unit)
        self._reduce(device, unit, whole)
        self._reduce_input = unit.index

    def _reduce(self, device: Device, unit: Unit, whole: float) -> None:
        index, numel = unit.index, self._sizes[unit.index].trained
        as_stored = self.setting.reduce_bytes == self.setting.parameter_bytes
        shard = f"gradient shard {index}"
        accumulated = shard in self._shards
        output = f"reduced {index}" if accumulated or not as_stored else shard
        device.hold(output, numel * self.setting.reduce_bytes, GRADIENTS if output == shard else REDUCED)
        self._send_gradients(device, unit, whole)
        if self._offloads:  # the CPU takes the result as it comes
            device.release(output)
            return
        if not as_stored:
            name = f"cast {index}" if accumulated else shard
            device.hold(name, numel * self.setting.parameter_bytes, GRADIENTS)
            if accumulated:
                device.release(name)
        if output != shard and not self._replicates:
            device.release(output)
        self._shards.add(shard)

    def _recast(self, device: Device, unit: Unit) -> None:
        """Without communication whole gradients stay, in the format they will be reduced in: one after the other."""
        recast = 0
        for parameter in unit.trained:
            recast += parameter.numel * self.setting.reduce_bytes
            device.hold(f"accumulated {unit.index}", recast, GRADIENTS)
            device.grow(gradients_of(unit), -self.gradient_bytes(parameter), GRADIENTS)
        device.release(gradients_of(unit))

    def _add(self, device: Device, unit: Unit) -> None:
        """Gradients are added to those that stayed, one after the other, which a CPU converts first."""
        for parameter in unit.trained:
            if self.setting.on_cpu:
                device.hold("converted", parameter.numel * self.setting.reduce_bytes, GRADIENTS)
                device.release("converted")
            device.grow(gradients_of(unit), -self.gradient_bytes(parameter), GRADIENTS)
        device.release(gradients_of(unit))

    def _release_gradients(self, device: Device, unit: Unit) -> None:
        device.release(gradients_of(unit))
        device.release(f"accumulated {unit.index}")

    def after_step_backward(self, device: Device) -> None:
        """Wait for the last unit's gradients; the buffers go."""
        if self._reduce_input is not None:
            device.release(f"reduce input {self._reduce_input}")
            self._reduce_input = None
            for name in self._sent:
                device.wait(name)
        for unit in self._units.values():
            device.release(f"reduced {unit.index}")

    def _gather(self, device: Device, unit: Unit) -> None:
        if unit.index in self._gathering or unit.index in self._whole:
            return
        self._gathering.add(unit.index)
        device.hooks()
        # What is cast comes one parameter after the other, each gone when it is cast.
        stored = [each.first_shard(self._factor) * self.setting.parameter_bytes for each in unit.parameters]
        self._upload(device, unit, max(stored) if self._casts(unit) else sum(stored))
        if self._factor == 1:
            return
        local = self._sizes[unit.index].computed
        if self._casts(unit):
            device.hold("cast", local, GATHERED)
            device.release(f"upload {unit.index}")
        device.hold(f"buffer {unit.index}", local * self._factor, GATHERED)
        device.release("cast")
        device.release(f"upload {unit.index}")
        device.send(f"all-gather {unit.index}", "all-gather", local * self._factor, SHARDS, GATHER)

    def _copy_out(self, device: Device, unit: Unit, *, forward: bool) -> None:
        if unit.index not in self._gathering:
            return
        self._gathering.discard(unit.index)
        self._whole.add(unit.index)
        sizes = self._sizes[unit.index]
        size = sizes.computed * self._factor
        if self._factor > 1:
            device.wait(f"all-gather {unit.index}")
        elif self._offloads:
            device.wait(f"upload {unit.index}")
        if forward and self._buffer is not None:  # the next gather waits until the unit before this one is copied out
            device.follow(GATHER, f"copied {self._buffer}")
        device.hold(f"whole {unit.index}", size, GATHERED)
        device.copy("copy out", 2 * size)
        device.mark(f"copied buffer {unit.index}")
        if forward:
            self._drop_buffer(device)
        if self._factor == 1:
            device.hold("cast", sizes.cast_in_turn, GATHERED)
            device.release("cast")
            device.release(f"upload {unit.index}")
        elif forward:
            self._buffer = f"buffer {unit.index}"
        else:
            device.follow(GATHER, f"copied buffer {unit.index}")
            device.release(f"buffer {unit.index}")

    def _drop_buffer(self, device: Device) -> None:
        if self._buffer is not None:
            device.release(self._buffer)
            self._buffer = None

    def _reshard(self, device: Device, unit: Unit) -> None:
        self._whole.discard(unit.index)
        device.release(f"whole {unit.index}")


@dataclass(frozen=True)
class _Sizes:
    """Of a unit on one rank."""

    numel: int
    """Elements of its shards."""
    computed: int
    """Bytes of them in the format they are computed in."""
    cast_in_turn: int
    """Bytes that casting one parameter after the other needs beyond the whole unit."""
    trained: int
    """Elements of the shards of parameters that have gradients."""
    gradients: int
    """Bytes of these in the format they are computed in."""


def _cast_in_turn(sizes: Sequence[int]) -> int:
    """With one rank per copy each parameter is cast, copied and forgotten before the next one's turn."""
    held, highest = 0, 0
    for size in sizes:
        highest = max(highest, held + 2 * size)
        held += size
    return highest - held
