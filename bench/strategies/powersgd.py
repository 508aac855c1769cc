"""PowerSGD as a communication hook of DDP: of each gradient matrix two narrow factors are all-reduced.

Vogels et al. 2019, arXiv:1905.13727, as ``torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py`` of torch 2.13
carries it out, with error feedback and warm start: what is lost in one step is added to the next one's gradient, and
the factors of one step are where the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.strategies.plan import REDUCE, REDUCED, WORLD, Device, Parameter

MIN_RATE = 2
"""A matrix is sent as factors if they are less than 1 / this of it (torch's default)."""

EPSILON = 1e-8
"""Added to the norm of a column that is normalised: a gradient that is zero must not become NaN."""

FIRST_START = 2
"""DDP makes its buckets anew after the first backward pass it reduces, and what is kept from one to the next belongs to
a bucket."""

COLUMN_KERNELS, PROJECTION_KERNELS = 3, 4
"""Kernels that normalise a column of a factor, and that take it out of those after it. From rank 3 on torch takes a QR
decomposition instead: not known to be faster or slower, and counted as the same."""


def register(wrapped: DistributedDataParallel, rank: int, start: int) -> PowerSGDState:
    """Have DDP compress its gradients.

    Parameters
    ----------
    rank: int
        Columns of the factors, at most.
    start: int
        Backward passes that are all-reduced in full before.
    """
    group = dist.group.WORLD
    assert group is not None
    if next(wrapped.parameters()).device.type == "cpu":
        group = WaitedFor(group)
    state = PowerSGDState(
        group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        min_compression_rate=MIN_RATE,
        orthogonalization_epsilon=EPSILON,
    )
    wrapped.register_comm_hook(state, powerSGD_hook)
    return state


class WaitedFor(dist.ProcessGroup):
    """A group whose all-reduces are over when they are returned.

    What the hook does after an all-reduce is then done by the thread that called it. On a CPU a thread of gloo would do
    it otherwise, whose allocations nobody sees; nor is there anything to hide it behind.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Over:  # type: ignore[override]
        """Reduce, and wait."""
        for tensor in tensors:
            dist.all_reduce(tensor, op=opts.reduceOp, group=self._group)
        return Over(tensors)


class Over(dist._Work):
    """Work that is over, whose future has its value."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(result)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Its value is there."""
        return self._future


class Compression:
    """What compressing buckets keeps, sends and takes. Sizes are of elements in the gradients' format."""

    def __init__(self, rank: int, itemsize: int) -> None:
        self._rank = rank
        self._itemsize = itemsize

    def begin(self, device: Device, parameters: Sequence[Parameter]) -> None:
        """From one step to the next: what was lost of every gradient, and the factors."""
        device.hold("errors", sum(each.numel for each in parameters) * self._itemsize, REDUCED)
        device.hold("factors", sum(map(sum, map(self.factors, parameters))) * self._itemsize, REDUCED)

    def factors(self, parameter: Parameter) -> tuple[int, int]:
        """Elements of the two factors a gradient is sent as; none if it is sent as it is."""
        rows = parameter.shape[0]
        columns = parameter.numel // rows
        rank = min(rows, columns, self._rank)
        if (rows + columns) * rank * MIN_RATE >= rows * columns:
            return 0, 0
        return rows * rank, columns * rank

    def send(self, device: Device, name: str, members: Sequence[Parameter]) -> str:
        """A bucket: add what was lost before, send, put together again, note what is lost.

        On a GPU the hook ends by waiting for the device (``torch.cuda.synchronize``), so nothing of it is hidden behind
        backward: products of matrices as narrow are bound by reading the gradient, and each all-reduce waits for what
        was computed before.

        Returns
        -------
        str
            The name of what was sent last.
        """
        size = sum(each.numel for each in members) * self._itemsize
        factors = [self.factors(each) for each in members]
        compressed = [each for each, (first, _) in zip(members, factors, strict=True) if first]
        whole = size - sum(each.numel for each in compressed) * self._itemsize
        device.hooks()
        device.copy("add errors", 3 * size)
        device.hold(f"{name} copy", size, REDUCED)
        device.copy("copy", 2 * size)
        device.hold(f"{name} whole", whole, REDUCED)
        device.copy("collect what is sent whole", 2 * whole)
        self._orthogonalise(device, compressed)
        self._multiply(device, compressed)
        self._all_reduce(device, f"{name} whole", whole)
        device.copy("put back what is sent whole", 2 * whole)
        self._all_reduce(device, f"{name} first", sum(first for first, _ in factors) * self._itemsize)
        self._orthogonalise(device, compressed)
        self._multiply(device, compressed)
        self._all_reduce(device, f"{name} second", sum(second for _, second in factors) * self._itemsize)
        self._multiply(device, compressed)
        device.hold(f"{name} errors", size, REDUCED)
        device.copy("errors", 3 * size)
        for what in ("copy", "whole", "errors"):
            device.release(f"{name} {what}")
        device.note_release()
        device.throttle(1)
        return f"{name} second"

    def _all_reduce(self, device: Device, name: str, size: int) -> None:
        device.send(name, "all-reduce", size, WORLD, REDUCE, after="compute")
        device.wait(name)

    def _orthogonalise(self, device: Device, compressed: Sequence[Parameter]) -> None:
        """The columns of one factor of each matrix, which are few and short: only starting the kernels takes time."""
        for each in compressed:
            rank = min(each.shape[0], each.numel // each.shape[0], self._rank)
            for _ in range(COLUMN_KERNELS * rank + PROJECTION_KERNELS * (rank - 1)):
                device.copy("orthogonalise", 0.0)

    def _multiply(self, device: Device, compressed: Sequence[Parameter]) -> None:
        """A product per matrix, which reads or writes the matrix once."""
        for each in compressed:
            device.copy("product", each.numel * self._itemsize)
