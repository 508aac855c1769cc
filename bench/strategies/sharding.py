"""What FSDP2 and FSDP1 share: knobs, the mesh of a sharding factor, and the name of what it comes to."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.errors import ImpossibleError
from bench.precision import AUTOCAST
from bench.precision import PARAMETERS as MIXED_PARAMETERS
from bench.strategies.base import Job, Strategy, that_train
from bench.strategies.plan import (
    GATHER,
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    REDUCE,
    REPLICAS,
    REPLICATE,
    SHARDS,
    Device,
    Plan,
    Setting,
    Unit,
    hold_optimizer,
    optimizer_bytes,
)
from bench.typed import Within

BLOCKS_PER_UNIT = Within(1, 10**6)


@dataclass(frozen=True)
class ShardingStrategy(Strategy):
    """Fully sharded data parallelism: parameters, gradients and optimizer state spread over `sharding_factor` ranks.

    The world is a mesh of W / F replicas by F shards, or of shards alone. F = 1 is full replication, F = W full
    sharding, what lies between is hybrid: gather and scatter among the F, all-reduce across the replicas.
    """

    reshard_after_forward: bool
    """Free a unit's gathered parameters after its forward and gather them again in backward (ZeRO-3), or keep them
    until its backward is done (ZeRO-2)."""
    forward_prefetch: bool
    """Issue the next unit's all-gather before the current unit's forward."""
    blocks_per_unit: Annotated[int, BLOCKS_PER_UNIT]
    """Transformer blocks whose parameters are gathered as one."""
    cpu_offload: bool
    """Keep the shards and the optimizer step on the CPU."""

    finetunes: ClassVar[tuple[str, ...]] = ("full", "lora")
    mixings: ClassVar[tuple[str, ...]] = (MIXED_PARAMETERS, AUTOCAST)
    shards_fp32_apart = True
    takes_float8 = True

    @property
    def offloaded(self) -> str:
        """Parameters (with their gradients), and the optimizer unless it stays on the device."""
        if not self.cpu_offload:
            return ""
        return "parameters and optimizer" if self.updates_on_host else "parameters"

    @property
    def updates_on_host(self) -> bool:
        """Whether optimizer state and the optimizer's step are offloaded, too."""
        return self.cpu_offload

    def check_device(self, device: str) -> None:
        """Offloading needs a device to offload from."""
        if self.cpu_offload and device == "cpu":
            raise ImpossibleError(
                "strategy.cpu_offload=true is not valid on a CPU, where parameters are already: choose false."
            )

    def check_finetune(self, name: str) -> None:
        """Packed weights have scales, which would have to be sharded with them."""
        if name == "qlora":
            raise ImpossibleError(
                f"finetune=qlora is not valid with strategy={self.name}, which would shard packed weights without the "
                f"scales that belong to them: choose finetune=lora with strategy fsdp, or strategy {that_train(name)}."
            )
        super().check_finetune(name)

    def effective(self, world_size: int) -> str:
        """Full or hybrid sharding, ZeRO-2 behaviour, or nothing sharded at all."""
        if self.factor == 1:
            return f"{self.name}/{'unsharded' if world_size == 1 else 'full_replication'}"
        kind = "full" if self.factor == world_size else "hybrid"
        if self.reshard_after_forward:
            return f"{self.name}/{kind}_shard"
        return f"{self.name}/{'' if kind == 'full' else 'hybrid_'}shard_grad_op"

    def mesh(self, job: Job) -> DeviceMesh:
        """The mesh (W / F replicas, F shards), its dimensions named as hybrid sharding requires; (W shards) for one
        replica, unless two dimensions were asked for."""
        if job.mesh is not None:
            return job.mesh
        if not self.has_replicas(job.world_size):
            return init_device_mesh(job.device.type, (job.world_size,), mesh_dim_names=("shard",))
        shape = (job.world_size // self.factor, self.factor)
        return init_device_mesh(job.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def has_replicas(self, world_size: int) -> bool:
        """Whether the mesh has a dimension of replicas."""
        return self.factor < world_size


class ShardedPlan(Plan):
    """What both keep track of: units by number, which of them are whole, and the shards of gradients."""

    def __init__(self, strategy: ShardingStrategy, setting: Setting) -> None:
        super().__init__(setting)
        self._offloads = strategy.cpu_offload
        self.updates_on_host = strategy.updates_on_host
        self._factor = strategy.factor
        self._replicates = strategy.has_replicas(setting.world_size)
        self._units = {unit.index: unit for unit in setting.units}
        self._last = max(self._units)
        self._whole: set[int] = set()
        self._synchronize = True
        self._shards: set[str] = set()
        self._sent: list[str] = []

    @abstractmethod
    def shard_numel(self, unit: Unit) -> int:
        """Elements of a unit that the first rank stores."""

    @abstractmethod
    def gradient_numel(self, unit: Unit) -> int:
        """Elements of a unit's reduced gradients that the first rank keeps; 0 where nothing of it is trained."""

    @property
    def host_bytes(self) -> float:
        """Offloaded shards of parameters and gradients, and of optimizer state if it goes with them."""
        if not self._offloads:
            return 0.0
        numel = sum(self.shard_numel(unit) + self.gradient_numel(unit) for unit in self._units.values())
        states = optimizer_bytes(self.setting, self.updated) if self.updates_on_host else 0.0
        return numel * self.setting.parameter_bytes + states

    @property
    def carried(self) -> float:
        """Parameters and gradients come, parameters go back, where only the optimizer is on the device."""
        if not self._offloads or self.updates_on_host:
            return 0.0
        return 3 * sum(self.updated) * self.setting.parameter_bytes

    def begin(self, device: Device) -> None:
        """Shards and their optimizer state, unless the CPU has them."""
        if not self.updates_on_host:
            hold_optimizer(device, self.setting, self.updated)
        if self._offloads:
            return
        sizes = {index: self.shard_numel(unit) * self.setting.parameter_bytes for index, unit in self._units.items()}
        device.hold("parameters", sum(sizes.values()), PARAMETERS)
        if self.setting.keep_gradients:
            for index, unit in self._units.items():
                if numel := self.gradient_numel(unit):
                    device.hold(f"gradient shard {index}", numel * self.setting.parameter_bytes, GRADIENTS)
                    self._shards.add(f"gradient shard {index}")

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """Remember whether gradients are reduced."""
        self._synchronize = synchronize

    def after_optimizer(self, device: Device) -> None:
        """Sharded gradients are set to None, or to zero."""
        if self.setting.keep_gradients and not self._offloads:
            device.copy("zeros", sum(self.updated) * self.setting.parameter_bytes)
            return
        for name in self._shards:
            device.release(name)
        self._shards.clear()

    def _upload(self, device: Device, unit: Unit, size: float) -> None:
        """An offloaded shard comes to the device, `size` bytes of it at a time, before it is gathered."""
        if self._offloads:
            device.hold(f"upload {unit.index}", size, GATHERED)
            device.transfer(f"upload {unit.index}", self.shard_numel(unit) * self.setting.parameter_bytes, GATHER)

    def _casts(self, unit: Unit) -> bool:
        """Whether a unit is computed in another format than it is stored in."""
        return self.setting.precision.mixed and self.setting.casts and not unit.keeps_fp32

    def _compute_bytes(self, unit: Unit) -> int:
        """Of one element of the unit as it is computed with."""
        return 4 if unit.keeps_fp32 else self.setting.cast_bytes

    def _previous(self, unit: Unit) -> Unit | None:
        """The unit whose backward comes next, as far as units run one after the other."""
        return self._units.get(self._last if unit.is_root else unit.index - 1) if unit.index != 0 else None

    def _send_gradients(self, device: Device, unit: Unit, whole: float) -> None:
        """Reduce-scatter among those that share a copy, then all-reduce among the copies, if the mesh has these."""
        self._sent = [f"reduce-scatter {unit.index}"]
        device.send(self._sent[0], "reduce-scatter", whole, SHARDS, REDUCE, after="compute")
        if self._replicates:
            self._sent.append(f"all-reduce {unit.index}")
            device.send(self._sent[1], "all-reduce", whole / self._factor, REPLICAS, REPLICATE, after=REDUCE)
        self._send_out(device, unit)

    def _send_out(self, device: Device, unit: Unit) -> None:
        """A reduced gradient goes to where its parameter is, if that is not the device."""
        if self._offloads:
            self._sent.append(f"gradient out {unit.index}")
            size = self.gradient_numel(unit) * self.setting.parameter_bytes
            device.transfer(self._sent[-1], size, REPLICATE, after=REDUCE)
