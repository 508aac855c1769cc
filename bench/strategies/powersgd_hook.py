"""torch's PowerSGD as a communication hook of DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.strategies.powersgd import MIN_COMPRESSION_RATE

ORTHOGONALIZATION_EPSILON = 1e-8
"""Added to the norm of a column that is normalised: a gradient that is zero must not become NaN."""


def register_powersgd_hook(wrapped: DistributedDataParallel, approximation_rank: int, start_iter: int) -> PowerSGDState:
    """Have DDP compress its gradients.

    Parameters
    ----------
    approximation_rank: int
        Columns of the factors, at most.
    start_iter: int
        Backward passes that are all-reduced in full before.
    """
    group = dist.group.WORLD
    assert group is not None
    if next(wrapped.parameters()).device.type == "cpu":
        group = SynchronousProcessGroup(group)
    state = PowerSGDState(
        group,
        matrix_approximation_rank=approximation_rank,
        start_powerSGD_iter=start_iter,
        min_compression_rate=MIN_COMPRESSION_RATE,
        orthogonalization_epsilon=ORTHOGONALIZATION_EPSILON,
    )
    wrapped.register_comm_hook(state, powerSGD_hook)
    return state


class SynchronousProcessGroup(dist.ProcessGroup):
    """A group whose all-reduces are over when they are returned.

    What the hook does after an all-reduce is then done by the thread that called it. On a CPU a thread of gloo would do
    it otherwise, whose allocations nobody sees; nor is there anything to hide it behind.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> FinishedCollectiveWork:  # type: ignore[override]
        for tensor in tensors:
            dist.all_reduce(tensor, op=opts.reduceOp, group=self._group)
        return FinishedCollectiveWork(tensors)


class FinishedCollectiveWork(dist._Work):
    """Work that is over, whose future has its value."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(result)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future
