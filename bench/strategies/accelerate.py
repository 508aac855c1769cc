"""Hugging Face Accelerate: DDP, FSDP2 and FSDP1 as `Accelerator` prepares and steps them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.core.errors import ImpossibleError
from bench.core.precision import Precision
from bench.core.presentation import Presentation, TrainingTerm
from bench.strategies.base import BuildOptimizer, WrapContext
from bench.strategies.framework import FrameworkStepper, FrameworkStrategy, PreparedModules, isolate_environment
from bench.strategies.fsdp.plan import FSDP2Plan
from bench.strategies.fsdp1.strategy import find_backward_prefetch
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.step_plan import StepPlan
from bench.strategies.stepper import Stepper

if TYPE_CHECKING:
    import torch
    from torch import nn

ENVIRONMENT_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Environment variables from which Accelerate takes what it is not told."""

_prepared_modules = PreparedModules()


@dataclass(frozen=True)
class AccelerateStrategy(FrameworkStrategy):
    """`Accelerator.prepare`, `Accelerator.backward`, and the optimizer that it prepared."""

    presentation = Presentation(
        label="Accelerate",
        position=70,
        kinds={  # colours of what it wraps, lighter
            "ddp": ("DDP", "#e27431"),
            "no_shard": ("no shard", ""),
            "full_replication": ("full replication", ""),
            "hybrid_shard": ("hybrid", ""),
            "hybrid_shard_grad_op": ("hybrid shard grad op", ""),
            "shard_grad_op": ("shard grad op", ""),
            "full_shard": ("full shard", "#529ac6"),
            "unsharded": ("unsharded", ""),
            "fsdp1_no_shard": ("FSDP1 no shard", ""),
            "fsdp1_hybrid_shard": ("FSDP1 hybrid", ""),
            "fsdp1_shard_grad_op": ("FSDP1 shard grad op", ""),
            "fsdp1_hybrid_shard_grad_op": ("FSDP1 hybrid shard grad op", ""),
            "fsdp1_full_shard": ("FSDP1 full shard", "#cb77a6"),
        },
        markers={"ddp": "v", "full_shard": "P", "fsdp1_full_shard": ">"},
    )
    training_terms = (
        TrainingTerm(
            "Accelerate, Trainer", ("strategy=accelerate",), "its loop is used: shows what the framework costs"
        ),
    )

    library = "accelerate"

    def check(self, world_size: int) -> None:
        """Everything is sharded, or with FSDP2 what a mesh of replicas and shards can say, or with DDP nothing."""
        is_fully_sharded, is_partly_sharded = (
            self.resolved_sharding_factor == world_size,
            1 < self.resolved_sharding_factor < world_size,
        )
        if self.backend == "ddp" or is_fully_sharded or (is_partly_sharded and self.backend == "fsdp"):
            return
        valid = "full, or strategy fsdp1" if self.backend == "fsdp1" else "more than 1, or strategy.backend=ddp"
        raise ImpossibleError(
            f"strategy.sharding_factor={self.resolved_sharding_factor} is not valid for strategy=accelerate with "
            f"strategy.backend={self.backend}: choose {valid}."
        )

    def casts_outputs_to_fp32(self, precision: Precision) -> bool:
        return precision.is_mixed and self.backend == "ddp"

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Let Accelerate wrap the model, then give it its weights; FSDP1 fills each unit before it is sharded."""
        import torch

        from bench.models.blocks import group_blocks

        units = group_blocks(context.family, model, self.blocks_per_unit) if self.blocks_per_unit else []
        accelerator = self._build_accelerator(context, {_find_block_class_name(unit) for unit in units})
        if self.backend == "fsdp":
            with _hide_embeddings(model):
                # FSDP2 is shared out in place, and only beside an optimizer. The true one comes when there are weights.
                accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        if self.backend != "fsdp1":
            context.materializer.fill_model(model)
        return _prepared_modules.remember_framework(
            model if self.backend == "fsdp" else accelerator.prepare(model), accelerator
        )

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """The plain strategy's, with FSDP2 as it is without being told along which dimension to cut a parameter."""
        if self.backend == "fsdp":
            return FSDP2Plan(self.plain_strategy, inputs, cuts_first_dimension=True)
        return super().plan(inputs)

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The optimizer as Accelerate prepares it."""
        prepared_optimizer: torch.optim.Optimizer = _prepared_modules.find_framework(module).prepare_optimizer(
            build(module.parameters())
        )
        return prepared_optimizer

    def build_stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """Backward and update as Accelerate's users write them."""
        return FrameworkStepper(_prepared_modules.find_framework(module), optimizer, scaler, keep_gradients)

    def clip_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """In Accelerate's words."""
        _prepared_modules.find_framework(module).clip_grad_norm_(module.parameters(), max_norm)

    @contextlib.contextmanager
    def control_gradient_sync(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation gradients stay local, in Accelerate's words too."""
        with contextlib.nullcontext() if synchronize else _prepared_modules.find_framework(wrapped).no_sync(wrapped):
            yield

    def _build_accelerator(self, context: WrapContext, block_class_names: set[str]) -> Any:
        """An `Accelerator` that finds the process group there is and changes nothing it is not asked to."""
        on_cpu = context.device.type == "cpu"
        with isolate_environment(ENVIRONMENT_PREFIXES, **_build_rank_environment(context.device)):
            from accelerate import Accelerator, DistributedType, PartialState
            from accelerate.state import AcceleratorState
            from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin, check_cuda_p2p_ib_support

            if not on_cpu and not {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"} <= {*os.environ}:
                require_supported_driver(check_cuda_p2p_ib_support())
            if self.backend == "ddp":
                accelerator = Accelerator(
                    device_placement=False,
                    mixed_precision=context.precision.compute if context.precision.is_mixed else "no",
                    cpu=on_cpu,
                )
                accelerator.ddp_handler = _build_ddp_handler(**self.build_ddp_options())
                return accelerator
            plugin = FullyShardedDataParallelPlugin(
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=sorted(block_class_names),
                cpu_offload=False,
                activation_checkpointing=False,  # the blocks have been given theirs
                cpu_ram_efficient_loading=False,
                **(
                    self._build_fsdp1_options(context)
                    if self.backend == "fsdp1"
                    else self._build_fsdp2_options(context)
                ),
            )
            parallelism_config = self._build_mesh(context)
            if on_cpu:  # where Accelerate would go on with DDP, without a word: it shards on accelerators only
                state = AcceleratorState(
                    mixed_precision="no",
                    cpu=True,
                    dynamo_plugin=TorchDynamoPlugin(),
                    parallelism_config=parallelism_config,
                    _from_accelerator=True,
                )
                for accelerator_state in (PartialState(), state):
                    accelerator_state.distributed_type = DistributedType.FSDP
                    accelerator_state.device = context.device
                state.fsdp_plugin = plugin
            return Accelerator(
                device_placement=False,
                mixed_precision="no",  # the plugin's policy casts
                cpu=on_cpu,
                fsdp_plugin=plugin,
                parallelism_config=parallelism_config,
            )

    def _build_mesh(self, context: WrapContext) -> Any:
        """Replicas and shards, where there are both."""
        from accelerate.utils import ParallelismConfig

        if self.resolved_sharding_factor == context.world_size:
            return None
        return ParallelismConfig(
            dp_replicate_size=context.world_size // self.resolved_sharding_factor,
            dp_shard_size=self.resolved_sharding_factor,
        )

    def _build_fsdp2_options(self, context: WrapContext) -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return {
            "fsdp_version": 2,
            "reshard_after_forward": self.reshard_after_forward,
            "mixed_precision_policy": MixedPrecisionPolicy(**_build_dtype_options(context.precision)),
        }

    def _build_fsdp1_options(self, context: WrapContext) -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecision
        from torch.distributed.fsdp import ShardingStrategy as FSDP1Sharding

        def fill_module(module: nn.Module) -> nn.Module:
            # The first shard of a flat parameter is its beginning, which may be a layer norm's ones and zeros.
            context.materializer.fill_module(
                module, constants=not context.is_rehearsed or self.resolved_sharding_factor == 1
            )
            return module

        sharding_strategy = FSDP1Sharding.FULL_SHARD if self.reshard_after_forward else FSDP1Sharding.SHARD_GRAD_OP
        return {
            "fsdp_version": 1,
            "sharding_strategy": sharding_strategy if self.resolved_sharding_factor > 1 else FSDP1Sharding.NO_SHARD,
            "backward_prefetch": find_backward_prefetch(self.backward_prefetch or "none"),
            "forward_prefetch": self.forward_prefetch,
            "limit_all_gathers": self.limit_all_gathers,
            "use_orig_params": True,
            "sync_module_states": False,
            "param_init_fn": fill_module,
            "mixed_precision_policy": MixedPrecision(
                **_build_dtype_options(context.precision), cast_forward_inputs=context.precision.is_mixed
            ),
        }


@contextlib.contextmanager
def _hide_embeddings(model: nn.Module) -> Iterator[None]:
    """Within, Accelerate finds no embeddings and no last norm to make another unit of: they stay in the root.

    torch 2.13 refuses that unit where, as in T5, more modules share the embedding than Accelerate 1.15 puts into it.
    """
    model.__dict__.update(get_input_embeddings=lambda: None, get_output_embeddings=lambda: None, base_model_prefix="")
    try:
        yield
    finally:
        for name in ("get_input_embeddings", "get_output_embeddings", "base_model_prefix"):
            del model.__dict__[name]


def _build_ddp_handler(**knobs: Any) -> Any:
    """What Accelerate hands to DDP, and one more that it does not know: whether DDP copies rank 0's weights first."""
    from accelerate.utils import DistributedDataParallelKwargs

    @dataclass
    class DDPHandler(DistributedDataParallelKwargs):
        init_sync: bool = True

    return DDPHandler(**knobs)


def _build_dtype_options(precision: Precision) -> dict[str, Any]:
    """Of gathered parameters and reduced gradients, as in the plain strategies."""
    return {
        "param_dtype": precision.compute_dtype if precision.is_mixed else None,
        "reduce_dtype": precision.reduce_dtype,
    }


def _find_block_class_name(block: nn.Module) -> str:
    """Class of a block, which Accelerate looks for below the wrapper of its checkpointing."""
    return type(getattr(block, "_checkpoint_wrapped_module", block)).__name__


def require_supported_driver(is_supported: bool) -> None:
    """Say in one sentence what Accelerate would refuse: transfers between GPUs that an old driver does not have."""
    if not is_supported:
        raise ImpossibleError(
            "strategy=accelerate refuses several GPUs of the RTX 40 series with a driver older than 550.40.07: set "
            "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1, update the driver, or choose strategy ddp, fsdp or fsdp1."
        )


def _build_rank_environment(device: torch.device) -> dict[str, str]:
    """Where this rank stands, which Accelerate reads in the environment even where a process group exists.

    Without OMP_NUM_THREADS it would set the number of threads. All ranks are said to be on one machine, wherever they
    are: it is read on CPUs only, where Accelerate 1.15 would want the address of another machine to make a process
    group by (MASTER_ADDR), which is there already.
    """
    import torch
    import torch.distributed as dist

    world_size, rank = str(dist.get_world_size()), str(dist.get_rank())
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank if device.type == "cpu" else str(device.index),
        "LOCAL_WORLD_SIZE": world_size,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
