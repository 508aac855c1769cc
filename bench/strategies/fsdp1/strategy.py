"""FSDP1: `FullyShardedDataParallel`, one flat parameter per unit. What the paper measured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.errors import ImpossibleError
from bench.core.presentation import FactorLine, Presentation, TrainingTerm
from bench.core.typed_config import OneOf
from bench.optimizers.updated_tensor import FLAT_TENSORS, WHOLE_TENSORS
from bench.strategies.base import StepSettings, WrapContext
from bench.strategies.fsdp1.plan import FSDP1Plan
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.sharding import ShardingStrategy
from bench.strategies.step_plan import StepPlan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import BackwardPrefetch


BACKWARD_PREFETCH_NAMES = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": None}
"""What torch's `BackwardPrefetch` calls them."""


def find_backward_prefetch(mode: str) -> BackwardPrefetch | None:
    """torch's name of when the next parameters are gathered in backward; None for when they are needed."""
    from torch.distributed.fsdp import BackwardPrefetch

    name = BACKWARD_PREFETCH_NAMES[mode]
    return None if name is None else BackwardPrefetch[name]


@dataclass(frozen=True)
class FSDP1Strategy(ShardingStrategy):
    """FSDP1. At factor 1 it is NO_SHARD, the paper's full replication."""

    presentation = Presentation(
        label="FSDP1",
        position=40,
        kinds={
            "no_shard": ("no shard", "#b8860b"),
            "full_replication": ("full replication", ""),
            "hybrid_shard": ("hybrid", "#40a383"),
            "hybrid_shard_grad_op": ("hybrid shard grad op", "#7d9d3c"),
            "shard_grad_op": ("shard grad op", "#d373a5"),
            "full_shard": ("full shard", "#a72bbd"),
            "unsharded": ("unsharded", ""),
        },
        is_sharded_by_factor=True,
        factor_line=FactorLine(kind="full_shard", offset_log2=0.06),
        markers={
            "no_shard": "^",
            "full_replication": "^",
            "hybrid_shard": "*",
            "hybrid_shard_grad_op": "P",
            "shard_grad_op": "h",
            "full_shard": "p",
            "unsharded": "d",
        },
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

    backward_prefetch: Annotated[str, OneOf(*BACKWARD_PREFETCH_NAMES)]
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
        from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision

        from bench.models.blocks import find_trained_layers, group_blocks

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
            "backward_prefetch": find_backward_prefetch(self.backward_prefetch),
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
        from torch.distributed.fsdp import ShardingStrategy as FSDP1Sharding

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
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert isinstance(wrapped, FullyShardedDataParallel)
        with contextlib.nullcontext() if synchronize else wrapped.no_sync():
            yield

    def build_grad_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """A scaler that agrees across shards whether a step overflowed."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device.type)

    def clip_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """By its own method: gradients are parts of flat ones, whose norm torch's function would take rank by rank."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert isinstance(module, FullyShardedDataParallel)
        module.clip_grad_norm_(max_norm)

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """One flat parameter per unit, cut into shards."""
        return FSDP1Plan(self, inputs)


def _find_parents(unit: nn.Module, children: set[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Where in `unit` the given modules hang: parent and attribute name."""
    return [(parent, name) for parent in unit.modules() for name, child in parent.named_children() if child in children]
