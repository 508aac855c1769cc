"""FSDP2: `fully_shard`, parameters as DTensors sharded on their first dimension."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bench.core.errors import ImpossibleError
from bench.core.presentation import FactorLine, Presentation, TrainingOption, TrainingTerm
from bench.optimizers.updated_tensor import DTENSORS, PARTS
from bench.strategies.base import BuildOptimizer, Strategy, WrapContext
from bench.strategies.fsdp.plan import FSDP2Plan, choose_sharded_dimension
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.sharding import ShardingStrategy
from bench.strategies.step_plan import StepPlan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class FSDP2Strategy(ShardingStrategy):
    """FSDP2. It has no all-gather rate limiter: memory is bounded by the order of its streams instead."""

    presentation = Presentation(
        label="FSDP2",
        position=50,
        kinds={
            "no_shard": ("no shard", ""),
            "full_replication": ("full replication", "#ad7f24"),
            "hybrid_shard": ("hybrid", "#24a450"),
            "hybrid_shard_grad_op": ("hybrid shard grad op", "#8a7a00"),
            "shard_grad_op": ("shard grad op", "#2083a4"),
            "full_shard": ("full shard", "#1a55f0"),
            "unsharded": ("unsharded", "#878787"),
        },
        is_sharded_by_factor=True,
        factor_line=FactorLine(kind="full_shard", offset_log2=-0.04),
        markers={
            "no_shard": ">",
            "full_replication": ">",
            "hybrid_shard": "s",
            "hybrid_shard_grad_op": "h",
            "shard_grad_op": "v",
            "full_shard": "o",
            "unsharded": "d",
        },
    )
    training_terms = (
        TrainingTerm(
            "ZeRO-2, sharded DDP, SHARD_GRAD_OP",
            ("strategy=zero2",),
            "gradients are to be divided too, and whole parameters fit",
            divides=("gradients", "optimizer state"),
        ),
        TrainingTerm(
            "ZeRO-3, FSDP FULL_SHARD",
            ("strategy=fsdp",),
            "a copy does not fit, the largest layer does",
            divides=("parameters", "gradients", "optimizer state"),
        ),
        TrainingTerm(
            "hybrid sharding",
            ("strategy=fsdp strategy.sharding_factor=node",),
            "a copy fits on the GPUs of a node",
            divides=("parameters", "gradients", "optimizer state"),
        ),
        TrainingTerm(
            "CPU offload",
            ("strategy=fsdp strategy.cpu_offload=true",),
            "the GPUs together are too small, and time matters less",
            divides=("parameters", "gradients", "optimizer state"),
        ),
    )
    training_options = (
        TrainingOption(
            "hybrid sharding: FSDP within each node",
            {"strategy": "fsdp", "strategy.sharding_factor": "node"},
            "only gradients cross the network between nodes",
            leaves={
                "DDP across nodes": 3,
                "fewer bytes between nodes": 1,
                "shard over all nodes": 3,
                "keep traffic within nodes": 1,
            },
        ),
        TrainingOption(
            "ZeRO-2",
            {"strategy": "fsdp", "strategy.sharding_factor": "full", "strategy.reshard_after_forward": "false"},
            "FSDP that keeps gathered parameters from forward to backward",
            leaves={"DDP": 3, "shard within the node": 2, "pipeline within the node": 2, "shard over all nodes": 2},
        ),
        TrainingOption(
            "ZeRO-3, which is FSDP full shard",
            {"strategy": "fsdp", "strategy.sharding_factor": "full", "strategy.reshard_after_forward": "true"},
            "the model's code stays as it is",
            leaves={
                "DDP": 4,
                "DDP across nodes": 4,
                "shard within the node": 1,
                "pipeline within the node": 3,
                "shard over all nodes": 1,
            },
        ),
        TrainingOption(
            "ZeRO-3 (FSDP) with parameters and optimizer on the CPU",
            {"strategy": "fsdp", "strategy.sharding_factor": "full", "strategy.cpu_offload": "true"},
            "as fast as the link to the CPU and its optimizer step allow",
            leaves={"too few GPUs": 1, "offload": 1},
        ),
    )

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
        assert isinstance(resolved, FSDP2Strategy)
        return dataclasses.replace(resolved, mesh_2d=resolved.has_replicas(world_size))

    def has_replicas(self, world_size: int) -> bool:
        """Where there are several, or it was asked for."""
        return self.mesh_2d or super().has_replicas(world_size)

    @property
    def updates_on_host(self) -> bool:
        """Unless the optimizer stays on the device."""
        return self.cpu_offload and not self.optimizer_on_device

    @property
    def has_host_collectives(self) -> bool:
        """Of gradients that were offloaded: whether one is no finite number anywhere, which loss scaling asks for."""
        return self.cpu_offload

    @property
    def updated_tensor_kind(self) -> str:
        """Where the optimizer alone is on the device it has what each rank stores, one parameter at a time."""
        return PARTS if self.optimizer_on_device else DTENSORS

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

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Shard each unit, then the root with what is left (the shared embedding among it), then fill the shards.

        What is not stored as it is drawn, as quantised weights, is filled just before its unit is sharded.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        from torch.distributed.tensor import Shard

        from bench.models.blocks import group_blocks

        casts_parameters = context.precision.is_mixed and not self.uses_autocast(context.precision)
        fp32_layers = (
            list(context.family.find_fp32_modules(model)) if context.precision.scales_loss and casts_parameters else []
        )
        options: dict[str, Any] = {
            "mesh": self.build_mesh(context),
            "offload_policy": CPUOffloadPolicy(pin_memory=context.device.type != "cpu")
            if self.cpu_offload
            else OffloadPolicy(),
        }
        policy = MixedPrecisionPolicy(
            param_dtype=context.precision.compute_dtype if casts_parameters else None,
            reduce_dtype=context.precision.reduce_dtype,
            cast_forward_inputs=not fp32_layers,
        )
        fp32_policy = MixedPrecisionPolicy(reduce_dtype=context.precision.reduce_dtype)
        factor = self.resolved_sharding_factor
        if any(choose_sharded_dimension(parameter.shape, factor) for parameter in model.parameters()):
            options["shard_placement_fn"] = lambda parameter: Shard(choose_sharded_dimension(parameter.shape, factor))
        sharded_layers: list[FSDPModule] = [
            fully_shard(layer, mp_policy=fp32_policy, reshard_after_forward=self.reshard_after_forward, **options)
            for layer in fp32_layers
        ]
        units: list[FSDPModule] = []
        for unit in group_blocks(context.family, model, self.blocks_per_unit):
            for layer in context.family.list_converted_modules(unit):
                context.materializer.fill_module(layer)
            units.append(
                fully_shard(unit, mp_policy=policy, reshard_after_forward=self.reshard_after_forward, **options)
            )
        # The root is needed again as soon as backward starts, so it is never resharded after forward.
        fully_shard(model, mp_policy=policy, reshard_after_forward=False, **options)
        self._configure_prefetch(units, sharded_layers)
        context.materializer.fill_model(model, keep_on_cpu=self.cpu_offload)
        return model

    def _configure_prefetch(self, units: Sequence[FSDPModule], layers: Sequence[FSDPModule]) -> None:
        """Between units; layers within them, which are sharded by themselves, are gathered as they are needed."""
        if self.forward_prefetch:
            for unit, next_unit in pairwise(units):
                unit.set_modules_to_forward_prefetch([next_unit])
        if not self.backward_prefetch:
            for unit in (*units, *layers):
                # FSDP2 prefetches by itself unless it is told what to prefetch; a unit is already there for itself.
                unit.set_modules_to_backward_prefetch([unit])

    @contextlib.contextmanager
    def control_gradient_sync(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation every rank keeps whole, unsharded gradients until the next reduce-scatter."""
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(synchronize)
        yield

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """Over the shards, wherever they are; or, if they alone are on the CPU, one that updates them on the device."""
        import torch
        from torch.distributed.tensor import DTensor

        from bench.strategies.uploading_optimizer import UploadingOptimizer

        if self.optimizer_on_device:
            parameters = list(module.parameters())
            assert isinstance(parameters[0], DTensor)
            return UploadingOptimizer(parameters, build, torch.device(parameters[0].device_mesh.device_type))
        return super().build_optimizer(module, build)

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """Shards of every parameter, gathered unit by unit."""
        return FSDP2Plan(self, inputs)
