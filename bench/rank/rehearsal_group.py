"""A process group of which one rank alone is there: its collectives move nothing between processes.

Everything else of a rank is as in a real run of that size: the sharding, the shapes, the kernels, the allocator. What
the other ranks would have sent is made up from what this one has, with as little work on the device as leaves sensible
values behind: zeros would run faster than real parameters, and what happened to lie in memory may be no number.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from bench.rank.backend import REHEARSAL_BACKEND

RECEIVED_STD = 1e-3
"""Spread of what a rank of a pipeline receives from a neighbour that is not there."""


class CompletedWork(dist._Work):
    """Work that is over: what it did is in the order of the stream it was called on."""

    def __init__(self, result: Any, device: torch.device | None) -> None:
        super().__init__()
        self._result = result
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._is_done = None if self._gpu is None else torch.cuda.current_stream(self._gpu).record_event()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Have the current stream wait for the stream the work was done on, as NCCL's work does, and for nothing more:
        a future would also have the allocator keep its tensors until that stream has come so far (``record_stream``),
        and what is reserved would be twice what NCCL's runs reserve."""
        if self._is_done is not None:
            torch.cuda.current_stream(self._gpu).wait_event(self._is_done)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that has its value."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[] if self._gpu is None else [self._gpu])
        future.set_result(self._result)
        return future

    def is_completed(self) -> bool:
        return True


class RehearsalGroup(dist.ProcessGroup):
    """A rank of a group whose others are not there.

    In a gather every other rank has what this one has: a sharded parameter becomes this rank's shard over and over,
    so that its values are spread like the true ones. A reduction leaves what this rank contributes, as if the others'
    contributions were zero, or the same where a mean is asked for.

    Parameters
    ----------
    rank: int
        Of the one that is there.
    size: int
        Ranks the group would have.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        """Ranks the group would have."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        """As `torch.distributed.get_backend` gives it."""
        return REHEARSAL_BACKEND

    @property
    def pg_name(self) -> str:
        """Name under which torch keeps the group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.pg_name

    supports_coalescing = False

    def _get_backend(self, device: torch.device) -> RehearsalGroup:  # type: ignore[override]
        """Itself: from torch 2.14 on a batch of sends asks the backend of every group whether it takes them at once."""
        return self

    def barrier(self, opts: Any = None) -> CompletedWork:  # type: ignore[override]
        return CompletedWork([], None)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> CompletedWork:  # type: ignore[override]
        """Everybody has the same already."""
        return _build_completed_work(tensors)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> CompletedWork:  # type: ignore[override]
        """Leave the tensors as they are."""
        return _build_completed_work(tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> CompletedWork:
        """Each of a list of outputs becomes the input."""
        with torch.no_grad():
            for output_parts, input_tensor in zip(outputs, inputs, strict=True):
                for output_part in output_parts:
                    output_part.copy_(input_tensor)
        return _build_completed_work(outputs[0])

    def all_gather_single(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> CompletedWork:
        """The output becomes the input over and over. FSDP2's input is its own part of the output already."""
        output_parts = output_tensor.view(self._size, -1)
        with torch.no_grad():
            own_part = output_parts[self._rank]
            if own_part.data_ptr() != input_tensor.data_ptr():
                own_part.copy_(input_tensor.view(-1))
            output_parts[: self._rank].copy_(own_part[None])
            output_parts[self._rank + 1 :].copy_(own_part[None])
        return _build_completed_work([output_tensor])

    def reduce_scatter_single(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> CompletedWork:
        """The output becomes this rank's part of the input."""
        with torch.no_grad():
            output_tensor.view(-1).copy_(input_tensor.view(self._size, -1)[self._rank])
        return _build_completed_work([output_tensor])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CompletedWork:
        """The same of each pair: what DTensors call."""
        for output_tensor, input_tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output_tensor, input_tensor)
        return _build_completed_work(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CompletedWork:
        """The same of each pair: what DTensors call."""
        for output_tensor, input_tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output_tensor, input_tensor)
        return _build_completed_work(outputs)

    def alltoall_base(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> CompletedWork:
        """Every other rank sends what this one sends it, in equal parts."""
        with torch.no_grad():
            output_tensor.view(-1).copy_(input_tensor.view(-1))
        return _build_completed_work([output_tensor])

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> CompletedWork:  # type: ignore[override]
        return _build_completed_work(tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> CompletedWork:  # type: ignore[override]
        """Numbers drawn at random, small ones as gradients are; whole numbers, which agree on something, are 1."""
        with torch.no_grad():
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.detach().normal_(std=RECEIVED_STD)
                else:
                    tensor.fill_(1)
        return _build_completed_work(tensors)

    # As torch called them before 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]


def _build_completed_work(tensors: list[torch.Tensor]) -> CompletedWork:
    return CompletedWork(tensors, tensors[0].device)


def _create_group(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> RehearsalGroup:
    return RehearsalGroup(rank, size)


def init_rehearsal_group(world_size: int, rank: int = 0) -> None:
    """Make this process one of `world_size` ranks, of which the others are not there."""
    if REHEARSAL_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(REHEARSAL_BACKEND, _create_group, devices=["cpu", "cuda"])
    dist.init_process_group(REHEARSAL_BACKEND, store=dist.HashStore(), rank=rank, world_size=world_size)
