"""DistributedDataParallel: a whole model on every rank, gradients averaged in buckets while backward runs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.errors import ImpossibleError, require_at_least
from bench.strategies.base import Job, Strategy, require_replicas


@dataclass(frozen=True)
class DDP(Strategy):
    """DDP with the settings of a fair baseline."""

    bucket_cap_mb: int
    """Size of a gradient bucket in MiB: smaller overlaps earlier, larger sends more at once."""
    gradient_as_bucket_view: bool
    """Gradients are views into the buckets, which saves one copy of them."""
    static_graph: bool | None
    """Promise that every step uses the same parameters in the same order. null: yes, unless micro-batches
    accumulate without communication, which DDP cannot combine with it."""

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy, and `static_graph` as a value."""
        static_graph = not accumulates if self.static_graph is None else self.static_graph
        if static_graph and accumulates:
            raise ImpossibleError(
                "strategy.static_graph=true is not valid with gradient accumulation that does not communicate: "
                "choose false or null, or gradient_accumulation_sync=true."
            )
        chosen = dataclasses.replace(self, static_graph=static_graph)
        return super(DDP, chosen).resolve(world_size, ranks_per_node, accumulates=accumulates)

    def check(self, world_size: int) -> None:
        """Any world size; nothing is sharded."""
        require_replicas(self)
        require_at_least("strategy.bucket_cap_mb", self.bucket_cap_mb, 1)

    def effective(self, world_size: int) -> str:
        """Always the same."""
        return "ddp"

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Give the model its weights and wrap it."""
        job.materializer.model(model)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[job.device.index] if job.device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            init_sync=False,  # every rank has filled its copy with the same values
        )
        if job.precision.reduce_dtype != job.precision.parameter_dtype:
            wrapped.register_comm_hook(job.precision.reduce_dtype, all_reduce_in_dtype)
        return wrapped

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation the gradients stay local until the next synchronised backward."""
        assert isinstance(wrapped, DistributedDataParallel)
        with contextlib.nullcontext() if synchronize else wrapped.no_sync():
            yield


def all_reduce_in_dtype(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook that averages a bucket in `dtype`, wider or narrower than the gradients."""
    gradients = bucket.buffer()
    sent = gradients.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    if gradients.device.type == "cpu":  # nothing to hide behind, and a gloo thread would release `sent` unseen
        work.wait()

    def write_back(_: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        gradients.copy_(sent)
        return gradients

    return work.get_future().then(write_back)
