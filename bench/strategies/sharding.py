"""What FSDP2 and FSDP1 share: knobs, the mesh of a sharding factor, and the name of what it comes to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from bench.core.errors import ImpossibleError
from bench.core.precision import AUTOCAST_MIXING
from bench.core.precision import PARAMETER_MIXING as MIXED_PARAMETERS
from bench.core.typed_config import Within
from bench.optimizers.updated_tensor import DTENSORS
from bench.strategies.base import Strategy, WrapContext
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.requirements import require_packed_bits
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    ALL_GATHER_STREAM,
    EXPERT_SHARD_GROUP,
    GRADIENT_MEMORY,
    PARAMETER_MEMORY,
    REDUCE_STREAM,
    REPLICA_GROUP,
    REPLICA_STREAM,
    SHARD_GROUP,
    PlanDevice,
    StepPlan,
    allocate_optimizer_state,
    compute_optimizer_bytes,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BLOCKS_PER_UNIT_RANGE = Within(1, 10**6)


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
    blocks_per_unit: Annotated[int, BLOCKS_PER_UNIT_RANGE]
    """Transformer blocks whose parameters are gathered as one."""
    cpu_offload: bool
    """Keep the shards and the optimizer step on the CPU."""

    supported_finetunes: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora")
    supported_mixings: ClassVar[tuple[str, ...]] = (MIXED_PARAMETERS, AUTOCAST_MIXING)
    shards_fp32_layers_separately = True
    takes_float8 = True
    takes_communicating_models = True

    @property
    def offloaded_state(self) -> str:
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

    def check_finetune(self, quantised_bits: int | None, adapter_dropout: float) -> None:
        """Quantised weights of 4 bits are parameters like others."""
        require_packed_bits(self.name, quantised_bits)

    def describe_effective_strategy(self, world_size: int) -> str:
        """Full or hybrid sharding, ZeRO-2 behaviour, or nothing sharded at all."""
        if self.resolved_sharding_factor == 1:
            return f"{self.name}/{'unsharded' if world_size == 1 else 'full_replication'}"
        kind = "full" if self.resolved_sharding_factor == world_size else "hybrid"
        if self.reshard_after_forward:
            return f"{self.name}/{kind}_shard"
        return f"{self.name}/{'' if kind == 'full' else 'hybrid_'}shard_grad_op"

    def build_mesh(self, context: WrapContext) -> DeviceMesh:
        """The mesh (W / F replicas, F shards), its dimensions named as hybrid sharding requires; (W shards) for one
        replica, unless two dimensions were asked for."""
        from torch.distributed.device_mesh import init_device_mesh

        if context.mesh is not None:
            return context.mesh
        if not self.has_replicas(context.world_size):
            return init_device_mesh(context.device.type, (context.world_size,), mesh_dim_names=("shard",))
        shape = (context.world_size // self.resolved_sharding_factor, self.resolved_sharding_factor)
        return init_device_mesh(context.device.type, shape, mesh_dim_names=("replicate", "shard"))

    @property
    def updated_tensor_kind(self) -> str:
        return DTENSORS

    def has_replicas(self, world_size: int) -> bool:
        """Whether the mesh has a dimension of replicas."""
        return self.resolved_sharding_factor < world_size


class ShardedPlan(StepPlan):
    """What both keep track of: units by number, which of them are whole, and the shards of gradients."""

    def __init__(self, strategy: ShardingStrategy, inputs: PlanInputs) -> None:
        super().__init__(inputs)
        self._offloads_parameters = strategy.cpu_offload
        self.updates_on_host = strategy.updates_on_host
        self._sharding_factor = strategy.resolved_sharding_factor
        self._has_replicas = strategy.has_replicas(inputs.world_size)
        self._units = {unit.index: unit for unit in inputs.units}
        self._last_index = max(self._units)
        self._unsharded_units: set[int] = set()
        self._synchronize = True
        self._gradient_shards: set[str] = set()
        self._pending_events: list[str] = []

    @abstractmethod
    def compute_shard_numel(self, unit: ShardingUnit) -> int:
        """Elements of a unit that the first rank stores."""

    @abstractmethod
    def compute_shard_bytes(self, unit: ShardingUnit) -> int:
        """Bytes of these."""

    @abstractmethod
    def compute_gradient_shard_numel(self, unit: ShardingUnit) -> int:
        """Elements of a unit's reduced gradients that the first rank keeps; 0 where nothing of it is trained."""

    def count_shards(self, parameter: ParameterSpec) -> int:
        """Ranks that a parameter is sharded over."""
        expert_shards = self.inputs.expert_shards
        return expert_shards if parameter.is_expert and expert_shards is not None else self._sharding_factor

    def count_unit_shards(self, unit: ShardingUnit) -> int:
        """Those of its parameters, of which all are experts or none is."""
        return self.count_shards(unit.parameters[0]) if unit.parameters else self._sharding_factor

    def find_shard_group(self, unit: ShardingUnit) -> str:
        """The ranks that a unit is sharded over."""
        has_experts = self.inputs.expert_shards is not None and any(spec.is_expert for spec in unit.parameters[:1])
        return EXPERT_SHARD_GROUP if has_experts else SHARD_GROUP

    @property
    def norm_groups(self) -> Sequence[str]:
        """Those that share a copy."""
        return (SHARD_GROUP,) if self._sharding_factor > 1 else ()

    @property
    def host_bytes(self) -> float:
        """Offloaded shards of parameters and gradients, and of optimizer state if it goes with them."""
        if not self._offloads_parameters:
            return 0.0
        units = self._units.values()
        gradient_bytes = sum(map(self.compute_gradient_shard_numel, units)) * self.inputs.parameter_itemsize
        state_bytes = compute_optimizer_bytes(self.inputs, self.updated_tensors) if self.updates_on_host else 0.0
        return sum(map(self.compute_shard_bytes, units)) + gradient_bytes + state_bytes

    @property
    def optimizer_transfer_bytes(self) -> float:
        """Parameters and gradients come, parameters go back, where only the optimizer is on the device."""
        if not self._offloads_parameters or self.updates_on_host:
            return 0.0
        return 3 * sum(self.updated_numels) * self.inputs.parameter_itemsize

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Shards and their optimizer state, unless the CPU has them, and the scales of quantised weights."""
        if not self.updates_on_host:
            allocate_optimizer_state(device, self.inputs, self.updated_tensors)
        device.allocate("scales", self.inputs.scale_bytes, PARAMETER_MEMORY)
        if self._offloads_parameters:
            return
        device.allocate("parameters", sum(map(self.compute_shard_bytes, self._units.values())), PARAMETER_MEMORY)
        if self.inputs.keep_gradients:
            for index, unit in self._units.items():
                if numel := self.compute_gradient_shard_numel(unit):
                    device.allocate(f"gradient shard {index}", numel * self.inputs.parameter_itemsize, GRADIENT_MEMORY)
                    self._gradient_shards.add(f"gradient shard {index}")

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """Remember whether gradients are reduced."""
        super().begin_micro_batch(device, number=number, synchronize=synchronize)
        self._synchronize = synchronize

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Sharded gradients are set to None, or to zero."""
        if self.inputs.keep_gradients and not self._offloads_parameters:
            device.copy_within_device("zeros", sum(self.updated_numels) * self.inputs.parameter_itemsize)
            return
        for name in self._gradient_shards:
            device.free(name)
        self._gradient_shards.clear()

    def _upload_shard(self, device: PlanDevice, unit: ShardingUnit, size: float) -> None:
        """An offloaded shard comes to the device, `size` bytes of it at a time, before it is gathered."""
        if self._offloads_parameters:
            device.allocate(f"upload {unit.index}", size, ALL_GATHER_MEMORY)
            device.copy_host_device(
                f"upload {unit.index}",
                self.compute_shard_bytes(unit),
                ALL_GATHER_STREAM,
            )

    def _casts_unit(self, unit: ShardingUnit) -> bool:
        """Whether a unit is computed in another format than it is stored in."""
        return self.inputs.precision.is_mixed and self.inputs.casts_parameters and not unit.keeps_fp32

    def _find_compute_itemsize(self, unit: ShardingUnit) -> int:
        """Of one element of the unit as it is computed with."""
        return 4 if unit.keeps_fp32 else self.inputs.cast_itemsize

    def _find_next_backward_unit(self, unit: ShardingUnit) -> ShardingUnit | None:
        """The unit whose backward comes next, as far as units run one after the other."""
        return self._units.get(self._last_index if unit.is_root else unit.index - 1) if unit.index != 0 else None

    def _start_gradient_reduction(self, device: PlanDevice, unit: ShardingUnit, reduce_bytes: float) -> None:
        """Reduce-scatter among those that share a copy, then all-reduce among the copies, if the mesh has these."""
        self._pending_events = [f"reduce-scatter {unit.index}"]
        device.run_collective(
            self._pending_events[0],
            "reduce-scatter",
            reduce_bytes,
            self.find_shard_group(unit),
            REDUCE_STREAM,
            after="compute",
        )
        if self._has_replicas:
            self._pending_events.append(f"all-reduce {unit.index}")
            device.run_collective(
                self._pending_events[1],
                "all-reduce",
                reduce_bytes / self.count_unit_shards(unit),
                REPLICA_GROUP,
                REPLICA_STREAM,
                after=REDUCE_STREAM,
            )
        self._offload_gradient(device, unit)

    def _offload_gradient(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """A reduced gradient goes to where its parameter is, if that is not the device."""
        if self._offloads_parameters:
            self._pending_events.append(f"gradient out {unit.index}")
            size = self.compute_gradient_shard_numel(unit) * self.inputs.parameter_itemsize
            device.copy_host_device(self._pending_events[-1], size, REPLICA_STREAM, after=REDUCE_STREAM)
