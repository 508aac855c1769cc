"""Lightning Fabric: DDP, FSDP1 and, with its ModelParallelStrategy, FSDP2 as `Fabric` sets them up and steps them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import Precision
from bench.core.presentation import Presentation, TrainingTerm
from bench.strategies.base import BuildOptimizer, StepSettings, Strategy, WrapContext
from bench.strategies.framework import FrameworkStepper, FrameworkStrategy, PreparedModules, isolate_environment
from bench.strategies.stepper import Stepper

if TYPE_CHECKING:
    import torch
    from torch import nn

ENVIRONMENT_PREFIXES = ("LT_", "PL_")
"""Environment variables from which Fabric takes what it is not told, a seed among them."""

_prepared_modules = PreparedModules()


@dataclass(frozen=True)
class LightningStrategy(FrameworkStrategy):
    presentation = Presentation(
        label="Lightning",
        position=80,
        kinds={  # colours of what it wraps, darker
            "ddp": ("DDP", "#ab4b00"),
            "no_shard": ("no shard", ""),
            "full_replication": ("full replication", ""),
            "hybrid_shard": ("hybrid", ""),
            "hybrid_shard_grad_op": ("hybrid shard grad op", ""),
            "shard_grad_op": ("shard grad op", ""),
            "full_shard": ("full shard", "#006cab"),
            "unsharded": ("unsharded", ""),
            "fsdp1_no_shard": ("FSDP1 no shard", ""),
            "fsdp1_hybrid_shard": ("FSDP1 hybrid", ""),
            "fsdp1_shard_grad_op": ("FSDP1 shard grad op", ""),
            "fsdp1_hybrid_shard_grad_op": ("FSDP1 hybrid shard grad op", ""),
            "fsdp1_full_shard": ("FSDP1 full shard", "#905476"),
        },
        markers={"ddp": "s", "full_shard": "s", "fsdp1_full_shard": "v"},
    )
    training_terms = (
        TrainingTerm("Lightning", ("strategy=lightning",), "its loop is used: shows what the framework costs"),
    )

    library = "lightning"

    mesh_2d: bool | None = None
    """Of fsdp: replicas are a dimension of the mesh even where there is one. null: only where there are several."""

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every framework, and `mesh_2d` as the mesh will be."""
        resolved = super().resolve(world_size, ranks_per_node, accumulates=accumulates)
        assert isinstance(resolved, LightningStrategy)
        if self.backend != "fsdp":
            if self.mesh_2d is not None:
                valid = f"null: strategy.backend={self.backend} of strategy={self.name} has no such knob"
                raise invalid_value_error("strategy.mesh_2d", self.mesh_2d, valid, ImpossibleError)
            return resolved
        return dataclasses.replace(resolved, mesh_2d=resolved.plain_strategy.has_replicas(world_size))

    def check_step(self, settings: StepSettings) -> None:
        dataclasses.replace(self.plain_strategy, name=f"{self.name} with strategy.backend={self.backend}").check_step(
            settings
        )

    @property
    def plain_mesh_knobs(self) -> dict[str, bool]:
        """Its users shard the model themselves, on the mesh they like."""
        return {"mesh_2d": bool(self.mesh_2d)} if self.backend == "fsdp" else {}

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Let Fabric wrap the model; what shards fills it by the way."""
        on_cpu = context.device.type == "cpu"
        if self.backend == "ddp":
            context.materializer.fill_model(model)
        if self.backend == "fsdp1":  # Fabric takes what is wrapped already; by itself it cannot wrap on a CPU
            model = self.plain_strategy.wrap(model, context)
        with isolate_environment(ENVIRONMENT_PREFIXES):
            from lightning.fabric import Fabric

            fabric = Fabric(
                accelerator="cpu" if on_cpu else "cuda",
                devices=1 if on_cpu else [context.device.index or 0],
                strategy=self._build_fabric_strategy(context),
                precision=self._find_fabric_precision(context.precision),
                plugins=[_build_group_environment()],
            )
            fabric.launch()
        return _prepared_modules.remember_framework(fabric.setup_module(model, move_to_device=False), fabric)

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The optimizer as Fabric sets it up."""
        prepared_optimizer: torch.optim.Optimizer = _prepared_modules.find_framework(module).setup_optimizers(
            build(module.parameters())
        )
        return prepared_optimizer

    def build_stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """Backward and update as Fabric's users write them."""
        return FrameworkStepper(_prepared_modules.find_framework(module), optimizer, scaler, keep_gradients)

    def clip_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """In Fabric's words."""
        _prepared_modules.find_framework(module).clip_gradients(module, optimizer, max_norm=max_norm)

    @contextlib.contextmanager
    def control_gradient_sync(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation gradients stay local, in Fabric's words too."""
        with _prepared_modules.find_framework(wrapped).no_backward_sync(wrapped, enabled=not synchronize):
            yield

    def casts_outputs_to_fp32(self, precision: Precision) -> bool:
        """All that are in 16 bits, as far as Fabric knows of it."""
        return precision.compute == "bf16" and (
            self.backend == "fsdp1" or self._find_fabric_precision(precision) != "32-true"
        )

    def _build_fabric_strategy(self, context: WrapContext) -> Any:
        from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

        if self.backend == "ddp":
            return DDPStrategy(**self.build_ddp_options())
        if self.backend == "fsdp":  # its users write what shards the model: here the plain strategy does it
            return ModelParallelStrategy(
                lambda module, mesh: self.plain_strategy.wrap(module, context),
                data_parallel_size=context.world_size,
                tensor_parallel_size=1,
            )

        class AnyDeviceFSDPStrategy(FSDPStrategy):
            """Fabric refuses the class it derives from on a CPU."""

        return AnyDeviceFSDPStrategy()

    def _find_fabric_precision(self, precision: Precision) -> Any:
        """Fabric's name of it; what shards has a policy of its own, beside which Fabric must not cast."""
        if precision.parameters == "bf16":
            return "bf16-true"
        return "bf16-mixed" if precision.is_mixed and self.backend == "ddp" else "32-true"


def _build_group_environment() -> Any:
    """Tells Fabric of the process group that exists, in which each process has one device."""
    import torch.distributed as dist
    from lightning.fabric.plugins.environments import LightningEnvironment

    class ExistingGroupEnvironment(LightningEnvironment):
        creates_processes_externally = True

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        def set_world_size(self, size: int) -> None:
            pass

        def set_global_rank(self, rank: int) -> None:
            pass

        def local_rank(self) -> int:
            return 0

        def node_rank(self) -> int:
            return dist.get_rank()

    return ExistingGroupEnvironment()
