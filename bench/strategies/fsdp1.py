"""FSDP1: `FullyShardedDataParallel`, one flat parameter per unit. What the paper measured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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

from bench.errors import require_choice
from bench.models.blocks import group_blocks
from bench.strategies.base import Job
from bench.strategies.sharding import ShardingStrategy

BACKWARD_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


@dataclass(frozen=True)
class FSDP1(ShardingStrategy):
    """FSDP1. At factor 1 it is NO_SHARD, the paper's full replication."""

    backward_prefetch: str
    """When to gather the next unit in backward: pre (before the current unit's computation), post or none."""
    limit_all_gathers: bool
    """The rate limiter: at most two all-gathers in flight."""

    def check(self, world_size: int) -> None:
        """As every sharding strategy, and the knobs of its own."""
        super().check(world_size)
        require_choice("strategy.backward_prefetch", self.backward_prefetch, BACKWARD_PREFETCH)

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Wrap each unit, then the root; every unit is filled just before it is sharded."""
        keep_fp32 = set(job.family.fp32_modules(model)) if job.precision.scales_loss else set()
        mixed = MixedPrecision(
            param_dtype=job.precision.compute_dtype if job.precision.mixed else None,
            reduce_dtype=job.precision.reduce_dtype,
            cast_forward_inputs=job.precision.mixed and not keep_fp32,
        )
        unmixed = MixedPrecision(reduce_dtype=job.precision.reduce_dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {
            **self._group(job),
            "device_id": job.device,
            "param_init_fn": job.materializer.module,
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


def _parents(unit: nn.Module, children: set[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Where in `unit` the given modules hang: parent and attribute name."""
    return [(parent, name) for parent in unit.modules() for name, child in parent.named_children() if child in children]
