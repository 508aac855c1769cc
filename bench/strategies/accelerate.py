"""Hugging Face Accelerate: DDP, FSDP2 and FSDP1 as `Accelerator` prepares and steps them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import ShardingStrategy as FSDP1Sharding

from bench.errors import ImpossibleError
from bench.models.blocks import group_blocks
from bench.precision import Precision
from bench.strategies.base import BuildOptimizer, Job
from bench.strategies.framework import Framework, Prepared, environment
from bench.strategies.fsdp1 import BACKWARD_PREFETCH
from bench.strategies.stepper import FrameworkStepper, Stepper

SETTINGS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Environment variables from which Accelerate takes what it is not told."""

_prepared = Prepared()


@dataclass(frozen=True)
class Accelerate(Framework):
    """`Accelerator.prepare`, `Accelerator.backward`, and the optimizer that it prepared."""

    library = "accelerate"

    def check(self, world_size: int) -> None:
        """Everything is sharded, or with FSDP2 what a mesh of replicas and shards can say, or with DDP nothing."""
        whole, between = self.factor == world_size, 1 < self.factor < world_size
        if self.backend == "ddp" or whole or (between and self.backend == "fsdp"):
            return
        valid = "full, or strategy fsdp1" if self.backend == "fsdp1" else "more than 1, or strategy.backend=ddp"
        raise ImpossibleError(
            f"strategy.sharding_factor={self.factor} is not valid for strategy=accelerate with "
            f"strategy.backend={self.backend}: choose {valid}."
        )

    def widens_outputs(self, precision: Precision) -> bool:
        """Those of autocast."""
        return precision.mixed and self.backend == "ddp"

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Let Accelerate wrap the model, then give it its weights; FSDP1 fills each unit before it is sharded."""
        units = group_blocks(job.family, model, self.blocks_per_unit) if self.blocks_per_unit else []
        accelerator = self._accelerator(job, {_inner(unit) for unit in units})
        if self.backend == "fsdp":
            with _blocks_alone(model):
                # FSDP2 is shared out in place, and only beside an optimizer. The true one comes when there are weights.
                accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        if self.backend != "fsdp1":
            job.materializer.model(model)
        return _prepared.note(model if self.backend == "fsdp" else accelerator.prepare(model), accelerator)

    def optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The optimizer as Accelerate prepares it."""
        prepared: torch.optim.Optimizer = _prepared.by(module).prepare_optimizer(build(module.parameters()))
        return prepared

    def stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """Backward and update as Accelerate's users write them."""
        return FrameworkStepper(_prepared.by(module), optimizer, scaler, keep_gradients)

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation gradients stay local, in Accelerate's words too."""
        with contextlib.nullcontext() if synchronize else _prepared.by(wrapped).no_sync(wrapped):
            yield

    def _accelerator(self, job: Job, units: set[str]) -> Any:
        """An `Accelerator` that finds the process group there is and changes nothing it is not asked to."""
        on_cpu = job.device.type == "cpu"
        with environment(SETTINGS, **_place(job.device)):
            from accelerate import Accelerator, DistributedType, PartialState
            from accelerate.state import AcceleratorState
            from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin, check_cuda_p2p_ib_support

            if not on_cpu and not {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"} <= {*os.environ}:
                refuse_old_drivers(check_cuda_p2p_ib_support())
            if self.backend == "ddp":
                accelerator = Accelerator(
                    device_placement=False,
                    mixed_precision=job.precision.compute if job.precision.mixed else "no",
                    cpu=on_cpu,
                )
                accelerator.ddp_handler = _ddp_knobs(**self.ddp_options())
                return accelerator
            plugin = FullyShardedDataParallelPlugin(
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=sorted(units),
                cpu_offload=False,
                activation_checkpointing=False,  # the blocks have been given theirs
                cpu_ram_efficient_loading=False,
                **(self._fsdp1(job) if self.backend == "fsdp1" else self._fsdp2(job)),
            )
            mesh = self._mesh(job)
            if on_cpu:  # where Accelerate would go on with DDP, without a word: it shards on accelerators only
                state = AcceleratorState(
                    mixed_precision="no",
                    cpu=True,
                    dynamo_plugin=TorchDynamoPlugin(),
                    parallelism_config=mesh,
                    _from_accelerator=True,
                )
                for each in (PartialState(), state):
                    each.distributed_type = DistributedType.FSDP
                    each.device = job.device
                state.fsdp_plugin = plugin
            return Accelerator(
                device_placement=False,
                mixed_precision="no",  # the plugin's policy casts
                cpu=on_cpu,
                fsdp_plugin=plugin,
                parallelism_config=mesh,
            )

    def _mesh(self, job: Job) -> Any:
        """Replicas and shards, where there are both."""
        from accelerate.utils import ParallelismConfig

        if self.factor == job.world_size:
            return None
        return ParallelismConfig(dp_replicate_size=job.world_size // self.factor, dp_shard_size=self.factor)

    def _fsdp2(self, job: Job) -> dict[str, Any]:
        return {
            "fsdp_version": 2,
            "reshard_after_forward": self.reshard_after_forward,
            "mixed_precision_policy": MixedPrecisionPolicy(**_formats(job.precision)),
        }

    def _fsdp1(self, job: Job) -> dict[str, Any]:
        def fill(module: nn.Module) -> nn.Module:
            # The first shard of a flat parameter is its beginning, which may be a layer norm's ones and zeros.
            job.materializer.module(module, constants=not job.rehearsed or self.factor == 1)
            return module

        sharded = FSDP1Sharding.FULL_SHARD if self.reshard_after_forward else FSDP1Sharding.SHARD_GRAD_OP
        return {
            "fsdp_version": 1,
            "sharding_strategy": sharded if self.factor > 1 else FSDP1Sharding.NO_SHARD,
            "backward_prefetch": BACKWARD_PREFETCH[self.backward_prefetch or "none"],
            "forward_prefetch": self.forward_prefetch,
            "limit_all_gathers": self.limit_all_gathers,
            "use_orig_params": True,
            "sync_module_states": False,
            "param_init_fn": fill,
            "mixed_precision_policy": MixedPrecision(
                **_formats(job.precision), cast_forward_inputs=job.precision.mixed
            ),
        }


@contextlib.contextmanager
def _blocks_alone(model: nn.Module) -> Iterator[None]:
    """Within, Accelerate finds no embeddings and no last norm to make another unit of: they stay in the root.

    torch 2.13 refuses that unit where, as in T5, more modules share the embedding than Accelerate 1.15 puts into it.
    """
    model.__dict__.update(get_input_embeddings=lambda: None, get_output_embeddings=lambda: None, base_model_prefix="")
    try:
        yield
    finally:
        for name in ("get_input_embeddings", "get_output_embeddings", "base_model_prefix"):
            del model.__dict__[name]


def _ddp_knobs(**knobs: Any) -> Any:
    """What Accelerate hands to DDP, and one more that it does not know: whether DDP copies rank 0's weights first."""
    from accelerate.utils import DistributedDataParallelKwargs

    @dataclass
    class Knobs(DistributedDataParallelKwargs):
        init_sync: bool = True

    return Knobs(**knobs)


def _formats(precision: Precision) -> dict[str, Any]:
    """Of gathered parameters and reduced gradients, as in the plain strategies."""
    return {
        "param_dtype": precision.compute_dtype if precision.mixed else None,
        "reduce_dtype": precision.reduce_dtype,
    }


def _inner(unit: nn.Module) -> str:
    """Class of a block, which Accelerate looks for below the wrapper of its checkpointing."""
    return type(getattr(unit, "_checkpoint_wrapped_module", unit)).__name__


def refuse_old_drivers(supported: bool) -> None:
    """Say in one sentence what Accelerate would refuse: transfers between GPUs that an old driver does not have."""
    if not supported:
        raise ImpossibleError(
            "strategy=accelerate refuses several GPUs of the RTX 40 series with a driver older than 550.40.07: set "
            "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1, update the driver, or choose strategy ddp, fsdp or fsdp1."
        )


def _place(device: torch.device) -> dict[str, str]:
    """Where this rank stands, which Accelerate reads in the environment even where a process group exists.

    Without OMP_NUM_THREADS it would set the number of threads. All ranks are said to be on one machine, wherever they
    are: it is read on CPUs only, where Accelerate 1.15 would want the address of another machine to make a process
    group by (MASTER_ADDR), which is there already.
    """
    ranks, rank = str(dist.get_world_size()), str(dist.get_rank())
    return {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank if device.type == "cpu" else str(device.index),
        "LOCAL_WORLD_SIZE": ranks,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
