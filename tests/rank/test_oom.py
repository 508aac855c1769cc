"""Running out of memory: recognised wherever it was wrapped, and nothing else is taken for it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bench.rank.out_of_memory import find_out_of_memory_error, find_requested_bytes, observe_failed_cuda_allocations
from bench.rank.run_rank import format_error_line
from tests.conftest import ROOT, SMALL_GPT

MIB = 2**20

CUDA_OOM_MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which ..."
)
ASYNC_OOM_MESSAGE = (
    "Allocation on device would exceed allowed memory. (out of memory)\nRequested               : 1.50 GiB"
)
CPU_OOM_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12345 bytes."
)
NCCL_OOM_MESSAGE = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error. Last error:\nCuda failure 2 'out of memory'"

GPU_OOM_ERRORS = [
    (torch.OutOfMemoryError(CUDA_OOM_MESSAGE), 20 * MIB),
    (torch.OutOfMemoryError(ASYNC_OOM_MESSAGE), 1536 * MIB),
    (
        RuntimeError(f"Got the following error when running the callback: OutOfMemoryError: {CUDA_OOM_MESSAGE}"),
        20 * MIB,
    ),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), None),
    (RuntimeError("CUDA driver error: out of memory"), None),
    (dist.DistBackendError(NCCL_OOM_MESSAGE), None),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), None),
    (RuntimeError("Triton Error [CUDA]: out of memory"), None),
]

OTHER_ERRORS = [
    dist.DistBackendError(
        "NCCL error: remote process exited or there was a network error. Last error:\n"
        "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"
    ),
    dist.DistBackendError("ncclSystemError: Error while creating shared memory segment: Cannot allocate memory"),
    RuntimeError("can't start new thread"),
    BlockingIOError(11, "Resource temporarily unavailable"),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("Connection closed by peer"),
    ValueError("out of range"),
    KeyError("x"),
]


@pytest.mark.parametrize(("error", "size"), GPU_OOM_ERRORS, ids=[str(error)[:40] for error, _ in GPU_OOM_ERRORS])
def test_a_gpus_memory_running_out_is_recognised(error: Exception, size: int | None) -> None:
    assert find_out_of_memory_error(error, "cuda") is error
    assert find_requested_bytes(error) == size


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=[str(error)[-40:] for error in OTHER_ERRORS])
def test_a_fault_of_the_machine_is_none_on_a_gpu(error: Exception) -> None:
    assert find_out_of_memory_error(error, "cuda") is None
    assert find_out_of_memory_error(error, "cuda", offloads=True) is None


@pytest.mark.parametrize("error", [RuntimeError(CPU_OOM_MESSAGE), MemoryError("std::bad_alloc"), MemoryError()])
def test_the_machines_memory_counts_where_it_is_used_as_the_devices(error: Exception) -> None:
    assert find_out_of_memory_error(error, "cpu") is error
    assert find_out_of_memory_error(error, "cuda", offloads=True) is error
    assert find_out_of_memory_error(error, "cuda") is None
    assert find_requested_bytes(error) == (12345 if "12345" in str(error) else None)


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), OSError(11, "Resource temporarily unavailable")]
)
def test_a_thread_lacks_memory_only_where_a_limit_is_used_up(error: Exception) -> None:
    assert find_out_of_memory_error(error, "cpu") is None
    assert find_out_of_memory_error(error, "cpu", limit_exhausted=True) is error


def catch_error(action: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        action()
    return caught.value


def test_causes_are_followed_and_what_was_suppressed_is_not() -> None:
    oom = torch.OutOfMemoryError(CUDA_OOM_MESSAGE)

    def raise_wrapped(how: str) -> None:
        try:
            raise oom
        except torch.OutOfMemoryError as error:
            if how == "group":
                raise ExceptionGroup("several", [ValueError("x"), error]) from None
            if how == "from":
                raise RuntimeError("Failed to run stage backward") from error
            if how == "hidden":
                raise RuntimeError("something else, which is what counts") from None
            raise ValueError("while handling")  # noqa: B904

    for how in ("from", "during", "group"):
        assert find_out_of_memory_error(catch_error(lambda: raise_wrapped(how)), "cuda") is oom, how  # noqa: B023
    assert find_out_of_memory_error(catch_error(lambda: raise_wrapped("hidden")), "cuda") is None
    first_error, second_error = ValueError("one"), ValueError("two")
    first_error.__cause__, second_error.__context__ = second_error, first_error
    assert find_out_of_memory_error(first_error, "cuda") is None  # and ends


def test_the_row_names_what_went_wrong_and_where_it_came_from() -> None:
    def raise_from_cause() -> None:
        try:
            raise RuntimeError("the true\ncause")
        except RuntimeError as error:
            raise ValueError("Failed to run stage backward") from error

    assert (
        format_error_line(catch_error(raise_from_cause))
        == "ValueError: Failed to run stage backward from RuntimeError: the true cause"
    )
    assert format_error_line(KeyError("x")) == "KeyError: 'x'"


# What frameworks make of it


class OomInBackward(torch.autograd.Function):
    """Computes, and runs out of memory backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError(CUDA_OOM_MESSAGE)


def fail_in_backward() -> None:
    OomInBackward.apply(torch.ones(2, requires_grad=True)).sum().backward()


def fail_under_checkpointing() -> None:
    value = torch.ones(2, requires_grad=True)
    checkpoint(lambda x: OomInBackward.apply(x * 2), value, use_reentrant=False).sum().backward()


def fail_in_pipeline_stage() -> None:
    from torch.distributed.pipelining._backward import stage_backward

    value = torch.ones(2, requires_grad=True)
    stage_backward(OomInBackward.apply(value).sum(), None, [value])


def fail_in_data_parallel_thread() -> None:
    """As ``torch.nn.parallel.parallel_apply`` hands on what a thread raised."""
    try:
        raise torch.OutOfMemoryError(CUDA_OOM_MESSAGE)
    except torch.OutOfMemoryError:
        caught = ExceptionWrapper(where="in replica 0 on device 0")
    caught.reraise()


def fail_in_compiler_backend() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise torch.OutOfMemoryError(CUDA_OOM_MESSAGE)

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def run_ddp_with_hook(hook: Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    hook.__annotations__ = {}  # as text, which annotations are here, DDP does not know them
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 2)).sum().backward()


def fail_in_ddp_hook() -> None:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise torch.OutOfMemoryError(CUDA_OOM_MESSAGE)

    run_ddp_with_hook(hook)


def fail_in_ddp_hook_callback() -> None:
    def fail(future: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError(CUDA_OOM_MESSAGE)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return allreduce_hook(dist.group.WORLD, bucket).then(fail)  # type: ignore[arg-type]

    run_ddp_with_hook(hook)


FAILING_ACTIONS = [
    fail_in_backward,
    fail_under_checkpointing,
    fail_in_pipeline_stage,
    fail_in_data_parallel_thread,
    fail_in_compiler_backend,
    fail_in_ddp_hook,
    fail_in_ddp_hook_callback,
]


@pytest.mark.parametrize("action", FAILING_ACTIONS, ids=lambda action: action.__name__)
def test_it_is_found_in_what_torch_makes_of_it(action: Callable[[], None]) -> None:
    with contextlib.ExitStack() as stack:
        if "ddp" in action.__name__:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        error = catch_error(action)
    shortage = find_out_of_memory_error(error, "cuda")
    assert shortage is not None
    assert find_requested_bytes(shortage) == 20 * MIB


def test_a_real_failed_allocation_is_recognised() -> None:
    error = catch_error(lambda: torch.empty(2**60, dtype=torch.uint8))
    assert find_out_of_memory_error(error, "cpu") is error
    assert find_requested_bytes(error) == 2**60


THREADS_SCRIPT = """
import _thread, os, threading
import torch
from bench.hardware import MemoryLimit
from bench.rank.out_of_memory import find_out_of_memory_error

limit = MemoryLimit(64 * 2**20, [torch.device("cpu")])
forever = threading.Event()
try:
    for _ in range(1000):
        _thread.start_new_thread(forever.wait, ())
except (RuntimeError, MemoryError) as error:
    lifted = limit.lift()
    print(repr(error), find_out_of_memory_error(error, "cpu", limit_exhausted=lifted) is not None, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_thread_without_memory_for_its_stack_is_out_of_memory() -> None:
    output = subprocess.run(
        [sys.executable, "-c", THREADS_SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=True,
    ).stdout
    assert "can't start new thread" in output
    assert output.split()[-1] == "True"


# How much was asked for


@pytest.mark.parametrize(
    ("observed", "requested_bytes"),
    [
        (None, 20 * MIB),
        (20 * MIB + 4096, 20 * MIB + 4096),  # the message is rounded
        (512 * MIB, 20 * MIB),  # of an earlier request, after which the run went on
    ],
)
def test_the_allocators_report_counts_where_it_is_of_this_request(observed: int | None, requested_bytes: int) -> None:
    assert find_requested_bytes(torch.OutOfMemoryError(CUDA_OOM_MESSAGE), observed) == requested_bytes


def test_an_allocator_that_reports_nothing_costs_the_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(observer: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver.")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)
    assert observe_failed_cuda_allocations()() is None


# The whole way to the row


@pytest.mark.long
@pytest.mark.slow
def test_a_pipeline_that_runs_out_of_memory_says_so_and_when(
    execute: Callable[..., list[dict[str, Any]]],
) -> None:
    (row,) = execute(
        (
            *SMALL_GPT,
            "strategy=pipeline",
            "gpus=2",
            "model.vocabulary_size=8192",
            "batch_size_per_gpu=16",
            "sequence_length=128",
            "measurement.steps=1",
            "measurement.warmup_steps=2",
            "hardware.memory_limit_gib=0.18",
        )
    )
    assert row["status"] == "oom", row["error"]
    assert row["oom_phase"] == "backward"  # of which torch says "Failed to run stage backward", and why only as a cause
    assert row["oom_rank"] == 1
    assert row["oom_bytes"] == 16 * 128 * 8192 * 4
