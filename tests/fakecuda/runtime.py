"""What a torch that was built without CUDA lacks of torch.cuda: `install` puts it where a CUDA build has it.

The functions of ``torch._C`` that torch.cuda calls, and classes in place of its streams, events and graphs. All of
torch's Python above them is torch's own. Streams, events, memory and operators are the C++ library's.
"""

from __future__ import annotations

import ctypes
import os
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICE_NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
UUID = "f4ceb1d0-0000-4000-8000-0000000000{:02x}"
FIRST_PCI_BUS = 0x18
"""Bus of the first device."""
DRIVER_VERSION = "580.65.06"
CUDA_VERSION = "13.0"
NCCL_VERSION = (2, 27, 7)
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
OTHER_USED_BYTES = 700 * 2**20
"""What a context and others use of each device beside the tensors."""

SEGMENT_BYTES = 2 * 2**20
"""Bytes of what is reserved at once."""

CALLS: list[str] = []
"""What was asked of the device and of NCCL in this process, in order: see `log_call`."""

CALL_TIMES_S: list[float] = []
"""When."""


def log_call(call: str) -> None:
    """Add a call to the log."""
    CALLS.append(call)
    CALL_TIMES_S.append(time.perf_counter())


class Stream(torch.Stream):
    """torch.cuda.Stream on the device guard's streams."""

    def __new__(cls, device: Any = None, priority: int = 0, **identity: int) -> Stream:
        if identity:
            return super().__new__(cls, **identity)
        index = torch.cuda._utils._get_device_index(device, optional=True)
        stream = super().__new__(cls, torch.device("cuda", index), priority=priority)
        log_call(f"stream {stream.stream_id}")
        return stream

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        log_call(f"{format_stream(self)} synchronized")
        super().synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))


class Event(torch.Event):
    """torch.cuda.Event on the device guard's events, of which none is used before it was recorded.

    CUDA lets a stream wait for such an event without waiting for anything: what orders work does not then.
    """

    _timed: bool

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        assert not interprocess
        event = super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)
        event._timed = enable_timing
        return event

    def record(self, stream: torch.Stream | None = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        super().record(stream)
        log_call(f"{format_stream(stream)} records")

    def wait(self, stream: torch.Stream | None = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        self._require_record("waited for")
        super().wait(stream)
        log_call(f"{format_stream(stream)} waits")

    def synchronize(self) -> None:
        self._require_record("synchronized")
        log_call("event synchronized")
        super().synchronize()

    def elapsed_time(self, other: torch.Event) -> float:
        assert isinstance(other, Event)
        for event in (self, other):
            event._require_record("read")
            assert event._timed, "the time of an event is read that was made without timing"
        elapsed: float = torch.ops.fakecuda.elapsed_ms(self.event_id, other.event_id)
        return elapsed

    def _require_record(self, what: str) -> None:
        if not self.event_id:
            raise AssertionError(f"an event is {what} that was never recorded")


class Graph:
    """torch.cuda.CUDAGraph: what is captured has run once, and replaying does nothing."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._captured = False

    def capture_begin(self, *pool: object, **options: object) -> None:
        log_call("graph captured")

    def capture_end(self) -> None:
        self._captured = True

    def replay(self) -> None:
        assert self._captured, "a graph is replayed that was never captured"
        log_call("graph replayed")


def format_stream(stream: torch.Stream) -> str:
    """A stream in the log."""
    return f"stream {stream.stream_id}"


class FakeCudaLibrary:
    """The C functions of the preloaded library."""

    def __init__(self) -> None:
        self._functions = ctypes.CDLL(os.environ["LD_PRELOAD"])
        for name in ("allocated", "peak", "total"):
            getattr(self._functions, f"fake_cuda_{name}").restype = ctypes.c_int64
        self._functions.fake_cuda_kernels.restype = ctypes.c_int64
        self._functions.fake_cuda_kernel.restype = ctypes.c_char_p
        self._callbacks: list[object] = []

    def allocated(self, device: int) -> int:
        return int(self._functions.fake_cuda_allocated(device))

    def peak(self, device: int) -> int:
        return int(self._functions.fake_cuda_peak(device))

    @property
    def total(self) -> int:
        return int(self._functions.fake_cuda_total())

    def reset_peak(self, device: int) -> None:
        log_call(f"peak of device {device} reset")
        self._functions.fake_cuda_reset_peak(device)

    def set_memory_fraction(self, device: int, fraction: float) -> None:
        log_call(f"fraction {fraction:.6f} of device {device}")
        self._functions.fake_cuda_limit(device, ctypes.c_int64(int(fraction * self.total)))

    def set_profiling(self, on: bool) -> None:
        self._functions.fake_cuda_profile(on)

    def list_kernels(self) -> Iterator[tuple[str, int, int, int, int]]:
        """Name, device, stream, start and end in nanoseconds of what ran since profiling was turned on."""
        numbers = (ctypes.c_int64 * 4)()
        for index in range(self._functions.fake_cuda_kernels()):
            name = self._functions.fake_cuda_kernel(ctypes.c_int64(index), numbers)
            yield name.decode(), *numbers

    def attach_oom_observer(self, observer: Callable[[int, int, int, int], None]) -> None:
        log_call("out of memory observed")

        def notify_observer(device: int, requested_bytes: int, total: int, free: int) -> None:
            log_call(f"{requested_bytes} bytes refused")
            observer(device, requested_bytes, total, free)

        callback = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(notify_observer)
        self._callbacks.append(callback)
        self._functions.fake_cuda_observe(callback)


def install() -> None:
    """Make torch.cuda of this process see the devices that the preloaded library has."""
    library = FakeCudaLibrary()
    torch_c, cuda = torch._C, torch.cuda
    get_device_index = torch_c._accelerator_getDeviceIndex

    def count_devices() -> int:
        return torch_c._accelerator_hooks_device_count()

    initialised_pids: list[int] = []

    def initialise_cuda() -> None:
        log_call("context")
        initialised_pids.append(os.getpid())
        cuda.default_generators = (torch.default_generator,) * count_devices()
        cuda._get_device_properties = build_properties  # type: ignore[attr-defined]

    def is_in_bad_fork() -> bool:
        return initialised_pids != [] and initialised_pids[-1] != os.getpid()

    def build_properties(device: int) -> Any:
        return types.SimpleNamespace(
            name=DEVICE_NAME,
            major=CAPABILITY[0],
            minor=CAPABILITY[1],
            total_memory=library.total,
            multi_processor_count=MULTIPROCESSORS,
            uuid=UUID.format(device),
            pci_domain_id=0,
            pci_bus_id=FIRST_PCI_BUS + device,
            pci_device_id=0,
            warp_size=32,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            gcnArchName="",
            is_integrated=0,
            is_multi_gpu_board=0,
        )

    def read_memory_stats(device: int) -> dict[str, Any]:
        def build_stat(current: int, peak: int) -> dict[str, dict[str, int]]:
            return {"all": {"current": current, "peak": peak, "allocated": 0, "freed": 0}}

        allocated, peak = library.allocated(device), library.peak(device)
        reserved = -(-peak // SEGMENT_BYTES) * SEGMENT_BYTES
        return {
            "allocated_bytes": build_stat(allocated, peak),
            "active_bytes": build_stat(allocated, peak),
            "reserved_bytes": build_stat(reserved, reserved),
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch_c._accelerator_setStream(Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

    def get_current_stream(device: int) -> tuple[int, int, int]:
        stream = torch_c._accelerator_getStream(device if device >= 0 else get_device_index())
        return stream.stream_id, stream.device_index, stream.device_type

    def set_device(device: int) -> None:
        log_call(f"device {device}")
        torch_c._accelerator_setDeviceIndex(device)

    def synchronize() -> None:
        log_call("device synchronized")
        torch_c._accelerator_synchronizeDevice(get_device_index())

    def memory_info(device: int) -> tuple[int, int]:
        return library.total - library.allocated(device) - OTHER_USED_BYTES, library.total

    functions: dict[str, Callable[..., Any]] = {
        "_cuda_getDeviceCount": count_devices,
        "_cuda_init": initialise_cuda,
        "_cuda_isInBadFork": is_in_bad_fork,
        "_cuda_getDevice": get_device_index,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": torch_c._accelerator_exchangeDevice,
        "_cuda_maybeExchangeDevice": torch_c._accelerator_maybeExchangeDevice,
        "_cuda_synchronize": synchronize,
        "_cuda_getCurrentStream": get_current_stream,
        "_cuda_getCurrentRawStream": lambda device: get_current_stream(device)[0],
        "_cuda_getDefaultStream": lambda device: (0, device if device >= 0 else get_device_index(), 1),
        "_cuda_setStream": set_stream,
        "_cuda_memoryStats": read_memory_stats,
        "_cuda_resetPeakMemoryStats": library.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_setMemoryFraction": lambda fraction, device: library.set_memory_fraction(device, fraction),
        "_cuda_attach_out_of_memory_observer": library.attach_oom_observer,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getArchFlags": lambda: ARCHITECTURES,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_sleep": lambda cycles: None,
        "_host_emptyCache": lambda: None,
        "_broadcast_coalesced": _broadcast_tensors,
        "_scatter": _scatter_tensor,
        "_gather": _gather_tensors,
        "_nccl_version": lambda: NCCL_VERSION[0] << 32 | NCCL_VERSION[1] << 16 | NCCL_VERSION[2],
        "_nccl_version_suffix": lambda: b"",
    }
    for name, function in functions.items():
        setattr(torch_c, name, function)
    torch_c._has_cuda = True
    torch.version.cuda = CUDA_VERSION
    cuda._cudart = types.SimpleNamespace(cudaMemGetInfo=memory_info)
    cuda._exchange_device = functions["_cuda_exchangeDevice"]
    cuda._maybe_exchange_device = functions["_cuda_maybeExchangeDevice"]
    cuda._is_in_bad_fork = is_in_bad_fork  # type: ignore[attr-defined]
    cuda.graphs._cuda_isCurrentStreamCapturing = functions["_cuda_isCurrentStreamCapturing"]
    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event  # type: ignore[attr-defined]
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = Graph  # type: ignore[assignment, misc]
    torch.UntypedStorage.resize_ = _wrap_resize(torch.UntypedStorage.resize_)  # type: ignore[method-assign]


def _broadcast_tensors(tensors: list[torch.Tensor], devices: list[int], buffer_size: int) -> list[list[torch.Tensor]]:
    """For nn.DataParallel, in one process: the tensors on each device, the first of which has them."""
    return [list(tensors), *([tensor.to(torch.device("cuda", device)) for tensor in tensors] for device in devices[1:])]


def _scatter_tensor(
    tensor: torch.Tensor, devices: list[int], sizes: list[int] | None, dim: int, streams: object
) -> list[torch.Tensor]:
    parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
    return [part.to(torch.device("cuda", device)) for part, device in zip(parts, devices, strict=True)]


def _gather_tensors(tensors: list[torch.Tensor], dim: int, destination: int) -> torch.Tensor:
    return torch.cat([tensor.to(torch.device("cuda", destination)) for tensor in tensors], dim)


def _wrap_resize(resize: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        with torch.no_grad():
            tensor = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.fakecuda.resize_storage(tensor, size)
        return self

    return resize_
