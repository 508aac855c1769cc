"""Processes for what may start CUDA or autograd: children of a process that has started neither.

CUDA cannot be used in a process forked from one that has started it, nor autograd in one forked from one that has run a
backward pass where there are GPUs. Where torch cannot reach any, this process is forked, with all it has imported.
Elsewhere children come from multiprocessing's forkserver, which has imported torch and this package and nothing else:
other libraries start CUDA when they are imported (torchao does, and transformers imports torchao).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from bench.core.installation import read_torch_version

P = ParamSpec("P")
T = TypeVar("T")

PR_SET_PDEATHSIG = 1

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that a terminal or SLURM sends to all processes of a run; only the one that watches over them acts."""

GPU_DEVICE_FILES = ("nvidiactl", "nvidia0", "nvmap", "dxg", "kfd")
"""Under /dev, one of them on every machine whose GPUs torch could use: NVIDIA, Jetson, Windows' Linux, AMD."""

FORKSERVER_MODULES = (
    "bench.core.forkserver",
    "torch.distributed.fsdp",
    "torch.profiler",
    "bench.rank.run_rank",
    "bench.prediction.trace.stage_trace",
)
"""What the forkserver imports: touches no device."""

# A forked child never destroys the garbage of its parent: a process group's destructor, for one, waits for threads
# that only the parent has.
os.register_at_fork(after_in_child=gc.freeze)


@functools.cache
def can_reach_gpus() -> bool:
    """Whether this torch was built for GPUs and this machine has a driver for some."""
    version = read_torch_version()
    built_for_gpus = version["cuda"] is not None or version["hip"] is not None
    return built_for_gpus and has_gpu_driver()


def has_gpu_driver() -> bool:
    """Whether this machine has a driver for GPUs, whatever torch was built for."""
    return any(Path("/dev", name).exists() for name in GPU_DEVICE_FILES)


def forks_children() -> bool:
    """Whether children are forked from this process, with all it has imported; else from the forkserver."""
    return not can_reach_gpus()


def get_mp_context() -> ForkContext | ForkServerContext:
    """How children are started here."""
    if forks_children():
        return multiprocessing.get_context("fork")
    forkserver_context = multiprocessing.get_context("forkserver")
    forkserver_context.set_forkserver_preload(list(FORKSERVER_MODULES))
    resource_tracker.ensure_running()  # by itself, for it takes back what signals are held
    with block_signals(*GROUP_SIGNALS):
        forkserver.ensure_running()
    return forkserver_context


@contextlib.contextmanager
def block_signals(*signals: signal.Signals) -> Iterator[None]:
    """Hear some signals only afterwards, and have processes started within never hear them unless they ask to.

    Ctrl-C goes to every process of a terminal: each would print a traceback, and submitit's controller would kill its
    job within a second.

    The mask is of this thread, and is what children inherit. What another thread of this process receives meanwhile
    would be handled by the main one, so there its handlers wait as well.
    """
    received: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in signals:
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                handlers[number] = signal.signal(number, lambda number, _: received.append(number))
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)  # what waited is heard here
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received_number in dict.fromkeys(received):
            signal.raise_signal(received_number)


def preload_if_forking(modules: Sequence[str]) -> None:
    """Import what children will need, if they will find it because they are forked."""
    if forks_children():
        preload_modules(tuple(modules))


@functools.cache
def preload_modules(modules: tuple[str, ...]) -> None:
    """Import what ranks need.

    The garbage collector rests meanwhile, and then leaves the imported objects alone for good: neither this process
    nor those forked from it, which share their pages, walk through them again. What imports leave to collect goes
    before: frames, which would keep those of all callers, and with them all that these compute afterwards.
    """
    gc.disable()
    gc.freeze()
    try:
        for module in ("torch.distributed.fsdp", "torch.profiler", *modules):
            importlib.import_module(module)
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


def bind_to_parent() -> None:
    """Have this child die with the process that started it, and leave polite signals to that one."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    assert parent is not None
    from_forkserver = (
        "bench.core.forkserver" in sys.modules
    )  # then the parent is the forkserver, which dies with the starter
    if not (
        parent.is_alive() if from_forkserver else os.getppid() == parent.pid
    ):  # it died before we asked to die with it
        os._exit(1)
    for signal_number in GROUP_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Pool(ProcessPoolExecutor):
    """Starts its processes with SIGINT held back, whenever it starts one: a forkserver's as calls come in."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with block_signals(signal.SIGINT):
            return super().submit(fn, *args, **kwargs)


@contextlib.contextmanager
def open_worker_pool(
    workers: int, initializer: Callable[..., object] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Children that work through calls; gone at once when it is left by an exception, Ctrl-C included."""
    pool = _Pool(workers, get_mp_context(), _initialize_worker, (workers > 1, initializer, initargs))
    try:
        pool.submit(int)  # starts the processes, or the first of them
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_is_one_of_several = False
"""Whether this process works for a pool, beside others."""


def count_workers() -> int:
    """Processes to share work among: one per processor; one where this process is itself one of several."""
    return 1 if _is_one_of_several else os.cpu_count() or 1


def _initialize_worker(
    is_one_of_several: bool, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]
) -> None:
    """One thread for each: GNU's OpenMP waits forever for the threads of the process that this one was forked from."""
    global _is_one_of_several
    _is_one_of_several = is_one_of_several
    bind_to_parent()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    else:
        os.environ["OMP_NUM_THREADS"] = "1"  # of a torch that this process imports later
    if initializer is not None:
        initializer(*initargs)


def call_isolated(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that may start CUDA or autograd: in a child where that could do harm to this process."""
    if not needs_isolation():
        return function(*args, **kwargs)
    with open_worker_pool(1) as pool:
        return pool.submit(function, *args, **kwargs).result()


def needs_isolation() -> bool:
    """Whether what may start CUDA or autograd is to be done in a child: not in one already."""
    return can_reach_gpus() and multiprocessing.parent_process() is None


def prepare_isolation() -> None:
    """Where something is soon to be done in such a child, have the forkserver import torch from now on; returns at
    once."""
    if needs_isolation():
        get_mp_context()


# --- Python's garbage collector, kept from looking through thousands of objects that all stay.


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Within, objects are released when nothing refers to them, and at no other time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


OBJECTS_PER_COLLECTION = 1_000_000
"""Python has 700."""


def collect_garbage_rarely() -> None:
    """Have this process look for objects that refer to each other alone less often.

    What is imported and what is predicted are objects by the hundred thousand that all stay: to walk through them again
    and again takes a fifth of the time of a command. Not for ranks, where such objects hold tensors.
    """
    gc.set_threshold(OBJECTS_PER_COLLECTION)


# --- What the C library does with memory that is freed on a CPU: give it back at once, or keep it for the next request.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
LARGE_BLOCK_BYTES = 64 * 1024
THREAD_STACK_BYTES = 512 * 1024


def keep_freed_memory() -> None:
    """Have this process keep all memory it was given, as the caching allocator does on a GPU.

    By itself glibc takes large blocks from the operating system anew and gives back the end of its heap when that is
    free. Every page is then provided, and zeroed, again in every step: up to half of the time of a small model's step,
    and more or less of it from run to run.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def return_freed_memory_at_once() -> None:
    """Have glibc map large blocks one by one, share one heap among threads, and reserve small stacks for them."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK_BYTES)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.malloc_trim(0)
    attributes = (ctypes.c_char * 64)()  # pthread_attr_t
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(THREAD_STACK_BYTES))
    libc.pthread_setattr_default_np(attributes)
