"""NCCL that is not there: its process group, with gloo to move what NCCL would.

Its collectives run in a stream of their own, as NCCL's do: it waits for the caller's stream, and whoever wants the
result waits for it. Tensors of the CPU are refused.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.fakecuda.runtime import format_stream, log_call

GROUPS: list[dict[str, Any]] = []
"""With what the groups of this process were made, in order: the first as `torch.distributed` was asked for it."""


class Collective(dist._Work):
    """A collective in NCCL's stream, and the event after it."""

    def __init__(self, done: torch.cuda.Event | None, result: Any) -> None:
        super().__init__()
        self._done = done
        devices = [] if done is None else [torch.device("cuda", torch.cuda.current_device())]
        # Its value is there when the current stream, NCCL's, has come so far.
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        self._future.set_result(result)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return True


class ProcessGroupNCCL(dist.ProcessGroup):
    """What torch makes for backend nccl."""

    class Options:
        """What torch sets before it makes one."""

        is_high_priority_stream: bool
        _timeout: datetime.timedelta
        global_ranks_in_group: list[int]
        group_name: str
        split_from: Any = None

    supports_splitting = False

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        self._stream: torch.cuda.Stream | None = None
        self._sent: list[Any] = []
        GROUPS.append({"rank": rank, "size": size, "timeout_s": options._timeout.total_seconds()})

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    def _get_backend(self, device: torch.device) -> ProcessGroupNCCL:
        assert device.type == "cuda", f"No backend type associated with device type {device.type}"
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """On which objects are sent."""
        return [torch.device("cuda")]

    def _set_sequence_number_for_group(self) -> None:
        """Gloo does for itself."""

    @property
    def pg_name(self) -> str:
        return str(distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.pg_name

    def _run_collective(
        self,
        name: str,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        run: Callable[[], Any],
        result: Any,
    ) -> Collective:
        if not all(tensor.is_cuda for tensor in (*read, *written)):
            work = run()  # gloo's, which a group may have beside NCCL
            if work is not None:
                work.wait()
            return Collective(None, result)
        caller = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        log_call(f"{format_stream(caller)}: {name} of {sum(tensor.numel() for tensor in read)} among {self._size}")
        self._stream.wait_event(caller.record_event())
        with torch.cuda.stream(self._stream), torch.no_grad():
            torch.ops.fakecuda.touch(list(read), list(written))
            began_ns = torch.ops.fakecuda.clock_ns()
            work = run()
            if work is not None:
                work.wait()
            torch.ops.fakecuda.collective(name, began_ns)
            return Collective(self._stream.record_event(), result)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Collective:  # type: ignore[override]
        operation, mean = _find_reduce_op(opts)

        def run() -> None:
            options = dist.AllreduceOptions()
            options.reduceOp = operation
            host_tensors = view_all_on_host(tensors)
            self._gloo.allreduce(host_tensors, options).wait()
            if mean:
                for tensor in host_tensors:
                    tensor.div_(self._size)

        return self._run_collective("all_reduce", tensors, tensors, run, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Collective:  # type: ignore[override]
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = opts.rootRank, opts.rootTensor
        return self._run_collective(
            "broadcast", tensors, tensors, lambda: self._gloo.broadcast(view_all_on_host(tensors), options), tensors
        )

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Collective:  # type: ignore[override]
        operation, mean = _find_reduce_op(opts)
        assert not mean
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = operation, opts.rootRank, opts.rootTensor
        return self._run_collective(
            "reduce", tensors, tensors, lambda: self._gloo.reduce(view_all_on_host(tensors), options), tensors
        )

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Collective:
        written = [part for parts in outputs for part in parts]
        host_outputs = [view_all_on_host(parts) for parts in outputs]
        return self._run_collective(
            "all_gather",
            inputs,
            written,
            lambda: self._gloo.allgather(host_outputs, view_all_on_host(inputs)),
            outputs[0],
        )

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Collective:
        return self.all_gather_single_coalesced([output], [own])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Collective:
        def run() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                parts = list(view_on_host(output).view(-1).chunk(self._size))
                self._gloo.allgather([parts], [view_on_host(own).reshape(-1).clone()]).wait()

        return self._run_collective("all_gather", inputs, outputs, run, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Collective:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Collective:
        operation, mean = _find_reduce_op(opts)

        def run() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                options = dist.AllreduceOptions()
                options.reduceOp = operation
                total = view_on_host(whole).reshape(-1).clone()
                self._gloo.allreduce([total], options).wait()
                own = total.chunk(self._size)[self._rank]
                view_on_host(output).view(-1).copy_(own.div_(self._size) if mean else own)

        return self._run_collective("reduce_scatter", inputs, outputs, run, outputs)

    def barrier(self, opts: Any = None) -> Collective:  # type: ignore[override]
        device = torch.device("cuda", torch.cuda.current_device())
        token = torch.zeros(1, device=device)
        work = self._run_collective("barrier", [token], [token], self._gloo.barrier, [token])
        work.wait()
        torch.cuda.current_stream().synchronize()
        return work

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Collective:  # type: ignore[override]
        def run() -> None:
            own = [tensor.clone() for tensor in view_all_on_host(tensors)]
            self._sent.append((own, self._gloo.send(own, dst, tag)))

        return self._run_collective("send", tensors, [], run, tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Collective:  # type: ignore[override]
        return self._run_collective(
            "recv", [], tensors, lambda: self._gloo.recv(view_all_on_host(tensors), src, tag), tensors
        )

    # As torch called them before 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]


def view_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU; an error for what the group was not made for."""
    if not tensor.is_cuda and "cpu:gloo" in str(GROUPS[0].get("backend")):
        return tensor
    host_tensor: torch.Tensor = torch.ops.fakecuda.host(tensor.detach())
    return host_tensor


def view_all_on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same of several."""
    return [view_on_host(tensor) for tensor in tensors]


def _find_reduce_op(opts: Any) -> tuple[Any, bool]:
    """The operation gloo has for what was asked for, and whether to divide by the ranks."""
    operation = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    if operation == dist.ReduceOp.AVG:
        return dist.ReduceOp.SUM, True
    return operation, False


def install() -> None:
    """Let `torch.distributed` make groups of backend nccl."""
    distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = distributed_c10d.default_pg_timeout
    distributed_c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    original_init = dist.init_process_group

    def init_process_group(backend: str, **options: Any) -> None:
        GROUPS.append({"backend": backend, **{key: str(value) for key, value in options.items() if key != "store"}})
        original_init(backend, **options)

    dist.init_process_group = init_process_group
