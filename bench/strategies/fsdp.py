"""FSDP2: `fully_shard`, parameters as DTensors sharded on their first dimension."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from bench.models.blocks import group_blocks
from bench.precision import Precision
from bench.strategies.base import Job
from bench.strategies.sharding import ShardingStrategy


@dataclass(frozen=True)
class FSDP2(ShardingStrategy):
    """FSDP2. It has no all-gather rate limiter: memory is bounded by the order of its streams instead."""

    backward_prefetch: bool
    """Issue the next unit's all-gather before the current unit's backward."""

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Shard each unit, then the root with what is left (the shared embedding among it), then fill the shards."""
        keep_fp32 = list(job.family.fp32_modules(model)) if job.precision.scales_loss else []
        options: dict[str, Any] = {
            "mesh": self.mesh(job),
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        }
        policy = _policy(job.precision, cast_inputs=not keep_fp32)
        for module in keep_fp32:
            full = MixedPrecisionPolicy(reduce_dtype=job.precision.reduce_dtype)
            fully_shard(module, mp_policy=full, reshard_after_forward=self.reshard_after_forward, **options)
        units: list[FSDPModule] = [
            fully_shard(unit, mp_policy=policy, reshard_after_forward=self.reshard_after_forward, **options)
            for unit in group_blocks(job.family, model, self.blocks_per_unit)
        ]
        # The root is needed again as soon as backward starts, so it is never resharded after forward.
        fully_shard(model, mp_policy=policy, reshard_after_forward=False, **options)
        self._set_prefetch(units)
        job.materializer.model(model, keep_on_cpu=self.cpu_offload)
        return model

    def _set_prefetch(self, units: Sequence[FSDPModule]) -> None:
        if self.forward_prefetch:
            for unit, following in pairwise(units):
                unit.set_modules_to_forward_prefetch([following])
        if not self.backward_prefetch:
            for unit in units:
                # FSDP2 prefetches by itself unless it is told what to prefetch; a unit is already there for itself.
                unit.set_modules_to_backward_prefetch([unit])

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation every rank keeps whole, unsharded gradients until the next reduce-scatter."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(synchronize)
        yield


def _policy(precision: Precision, *, cast_inputs: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype if precision.mixed else None,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=cast_inputs,
    )
