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
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import ShardingStrategy as FSDP1Sharding

from bench.models.blocks import group_blocks
from bench.strategies.base import BuildOptimizer, Job
from bench.strategies.framework import Framework, Prepared
from bench.strategies.stepper import Stepper

SETTINGS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Environment variables from which Accelerate takes what it is not told."""

BACKWARD_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}

_prepared = Prepared()


@dataclass(frozen=True)
class Accelerate(Framework):
    """`Accelerator.prepare`, `Accelerator.backward`, and the optimizer that it prepared."""

    library = "accelerate"

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
        return AccelerateStepper(_prepared.by(module), optimizer, scaler, keep_gradients)

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation gradients stay local, in Accelerate's words too."""
        with contextlib.nullcontext() if synchronize else _prepared.by(wrapped).no_sync(wrapped):
            yield

    def _accelerator(self, job: Job, units: set[str]) -> Any:
        """An `Accelerator` that finds the process group there is and changes nothing it is not asked to."""
        from accelerate import Accelerator, DistributedType, PartialState
        from accelerate.utils import FullyShardedDataParallelPlugin

        on_cpu = job.device.type == "cpu"
        with _environment(job.device):
            if self.backend == "ddp":
                accelerator = Accelerator(
                    device_placement=False,
                    mixed_precision=job.precision.compute if job.precision.mixed else "no",
                    cpu=on_cpu,
                )
                accelerator.ddp_handler = _ddp_knobs(
                    bucket_cap_mb=self.bucket_cap_mb,
                    gradient_as_bucket_view=self.gradient_as_bucket_view,
                    static_graph=self.static_graph,
                    init_sync=False,  # every rank has filled its copy with the same values
                )
                return accelerator
            plugin = FullyShardedDataParallelPlugin(
                mixed_precision_policy=self._policy(job),
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=sorted(units),
                cpu_offload=False,
                activation_checkpointing=False,  # the blocks have been given theirs
                cpu_ram_efficient_loading=False,
                **(self._fsdp1(job) if self.backend == "fsdp1" else self._fsdp2()),
            )
            accelerator = Accelerator(device_placement=False, mixed_precision="no", cpu=on_cpu, fsdp_plugin=plugin)
        if on_cpu:  # where Accelerate would go on with DDP, without a word: it shards on accelerators only
            for state in (PartialState(), accelerator.state):
                state.distributed_type = DistributedType.FSDP
                state.device = job.device
            accelerator.state.fsdp_plugin = plugin
        return accelerator

    def _fsdp2(self) -> dict[str, Any]:
        return {"fsdp_version": 2, "reshard_after_forward": bool(self.reshard_after_forward)}

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
            "forward_prefetch": bool(self.forward_prefetch),
            "limit_all_gathers": bool(self.limit_all_gathers),
            "use_orig_params": True,
            "sync_module_states": False,
            "param_init_fn": fill,
        }

    def _policy(self, job: Job) -> MixedPrecision | MixedPrecisionPolicy:
        """As the plain strategy's, which Accelerate takes as it is."""
        kind = MixedPrecision if self.backend == "fsdp1" else MixedPrecisionPolicy
        return kind(
            param_dtype=job.precision.compute_dtype if job.precision.mixed else None,
            reduce_dtype=job.precision.reduce_dtype,
            cast_forward_inputs=job.precision.mixed or self.backend == "fsdp",
        )


class AccelerateStepper(Stepper):
    """Backward through the accelerator, update through the optimizer it prepared."""

    def __init__(
        self, accelerator: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> None:
        super().__init__(optimizer, scaler, keep_gradients)
        self._accelerator = accelerator

    def backward(self, loss: torch.Tensor) -> None:
        """`Accelerator.backward`."""
        self._accelerator.backward(loss)

    def update(self) -> None:
        """The prepared optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self._keep_gradients)


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


def _inner(unit: nn.Module) -> str:
    """Class of a block, which Accelerate looks for below the wrapper of its checkpointing."""
    return type(getattr(unit, "_checkpoint_wrapped_module", unit)).__name__


@contextlib.contextmanager
def _environment(device: torch.device) -> Iterator[None]:
    """Within, the environment says where this rank stands, and nothing of how to train.

    Accelerate reads it even where a process group exists; without OMP_NUM_THREADS it would set the number of threads.
    """
    before = dict(os.environ)
    for name in before:
        if name.startswith(SETTINGS):
            del os.environ[name]
    ranks, rank = str(dist.get_world_size()), str(dist.get_rank())
    os.environ.update(
        RANK=rank,
        WORLD_SIZE=ranks,
        LOCAL_RANK=rank if device.type == "cpu" else str(device.index),
        LOCAL_WORLD_SIZE=ranks,
        OMP_NUM_THREADS=str(torch.get_num_threads()),
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
