"""How busy processors and GPUs were while a rank was timed, and when that makes its time doubtful.

Of processors ``/proc/stat`` says what everybody together computed, in ticks of 10 ms. What a run's own ranks computed
is taken away from that: what is left is others' (the kernel's work for them, and what a hypervisor gave to other
virtual machines, included).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.hardware.facts import decode_text

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

PROC_STAT = Path("/proc/stat")

MIN_TIMED_WINDOW_S = 0.5
"""A shorter time is too few ticks: then what others computed is counted from the beginning of warm-up."""

MIN_WINDOW_S = 0.2
"""Over still less time nothing is said."""

MAX_OTHERS_CPU_SHARE = 0.10
"""Share of the time of the processors a rank may use above which others' work makes its step times doubtful."""


@dataclass(frozen=True)
class CpuCounters:
    """The processors' counters at one moment."""

    read_at_s: float
    busy_s: float
    """Of all processors this process may use, since they were started."""
    own_s: float
    """Processor time of this process and the children it waited for."""


@dataclass(frozen=True)
class CpuLoad:
    """What was computed on the processors of a rank, by whom, over a time."""

    window_s: float
    busy_s: float
    own_s: float
    cpus: tuple[int, ...]
    """Numbers of the processors the rank may use."""
    load_average: float
    """Of the machine over the last minute, at the end: processes that compute or wait for a processor or a disk."""


def read_cpu_counters(cpus: Iterable[int], stat_path: Path = PROC_STAT) -> CpuCounters | None:
    """The counters now; None where the system has none."""
    try:
        lines = stat_path.read_text().splitlines()
    except OSError:
        return None
    cpu_names = {f"cpu{cpu}" for cpu in cpus}
    busy_ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name in cpu_names:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (int(field) for field in fields)
            busy_ticks += user + nice + system + irq + softirq + steal
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return CpuCounters(time.perf_counter(), busy_ticks / os.sysconf("SC_CLK_TCK"), own_s)


class CpuLoadProbe:
    """Reads the counters around a rank's steps."""

    def __init__(self) -> None:
        self._cpus = tuple(list_usable_cpus())
        self._before_warmup = read_cpu_counters(self._cpus)
        self._before_steps: CpuCounters | None = None

    def start_timed_steps(self) -> None:
        """Right before the timed steps."""
        self._before_steps = read_cpu_counters(self._cpus)

    def stop(self) -> CpuLoad | None:
        """Right after the timed steps; None where the system says nothing."""
        end, start = read_cpu_counters(self._cpus), self._before_steps
        if end is None or start is None or self._before_warmup is None:
            return None
        if end.read_at_s - start.read_at_s < MIN_TIMED_WINDOW_S:
            start = self._before_warmup
        return CpuLoad(
            end.read_at_s - start.read_at_s,
            end.busy_s - start.busy_s,
            end.own_s - start.own_s,
            self._cpus,
            os.getloadavg()[0],
        )


def compute_others_cpu_share(loads_by_host: Mapping[str, Sequence[CpuLoad]]) -> float | None:
    """Share of the processors' time that processes outside the run used, of the machine where it was most.

    Parameters
    ----------
    loads_by_host: mapping
        Of the ranks, by host. Ranks that may use the same processors are counted together.

    Returns
    -------
    float or None
        0 to 1; None where no rank was watched for `MIN_WINDOW_S`.
    """
    shares = []
    for host_loads in loads_by_host.values():
        for cpus in {load.cpus for load in host_loads}:
            shared_loads = [load for load in host_loads if load.cpus == cpus and load.window_s >= MIN_WINDOW_S]
            if shared_loads:
                busy_cpus = sum(load.busy_s / load.window_s for load in shared_loads) / len(shared_loads)
                own_cpus = sum(load.own_s / load.window_s for load in shared_loads)
                shares.append(min(1.0, max(0.0, busy_cpus - own_cpus) / len(cpus)))
    return max(shares, default=None)


def find_cpu_degradations(share: float | None) -> list[str]:
    """Why others' work on the processors makes a time doubtful, if it does."""
    if share is None or share <= MAX_OTHERS_CPU_SHARE:
        return []
    return [f"other processes used {share:.0%} of the processors"]


# --- How many threads a rank computes with beside its GPU, and on which processors.


def limit_cpu_threads(store: dist.Store | None, rank: int, node_ranks: Sequence[int]) -> None:
    """Have this process compute with its share of the threads that torch would start for it alone.

    Optimizers of offloaded parameters run on them: each of 8 ranks of a machine with all its processors would be many
    times slower. Ranks that may use the same processors share them; ranks that were bound to their own do not.
    Whoever sets ``OMP_NUM_THREADS`` has decided.

    Parameters
    ----------
    store: Store or None
        In which the ranks of the run find each other; None for a rank that is alone.
    rank: int
        This one.
    node_ranks: sequence of int
        All ranks of its machine, which call this together.
    """
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        return
    own_affinity = {"host": socket.gethostname(), "cpus": list_usable_cpus()}
    affinities = [own_affinity]
    if store is not None:
        store.set(f"processors/{rank}", json.dumps(own_affinity))
        affinities = [json.loads(store.get(f"processors/{node_rank}")) for node_rank in node_ranks]
    torch.set_num_threads(compute_thread_share(own_affinity, affinities, torch.get_num_threads()))


def compute_thread_share(own_affinity: dict[str, Any], affinities: Sequence[dict[str, Any]], threads: int) -> int:
    """Of `threads`, those of a rank: an equal part for each rank of its host that may use any of its processors."""
    sharing_ranks = [
        affinity
        for affinity in affinities
        if affinity["host"] == own_affinity["host"] and set(affinity["cpus"]) & set(own_affinity["cpus"])
    ]
    return max(1, threads // max(1, len(sharing_ranks)))


def list_usable_cpus() -> list[int]:
    """Numbers of the processors this process may use."""
    return sorted(os.sched_getaffinity(0))


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: ``0-3,8``."""
    number_ranges: list[list[int]] = []
    for number in numbers:
        if number_ranges and number == number_ranges[-1][-1] + 1:
            number_ranges[-1] = [number_ranges[-1][0], number]
        else:
            number_ranges.append([number])
    return ",".join("-".join(map(str, number_range)) for number_range in number_ranges)


# --- What NVML says of a rank's GPU: what it is, how it is set, and how it is under load.

GpuInfo = dict[str, Any]

THROTTLE_REASON_BY_BIT = {
    0x2: "applications clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
"""Bits of ``nvmlDeviceGetCurrentClocksEventReasons`` (nvml.h) that hold clocks down, but for idleness (0x1)."""

DEGRADING_THROTTLE_REASONS = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
)
"""Reasons for which a GPU is slower than others of its kind. At its power cap every GPU of a kind is alike."""

MIN_BUSY_UTILIZATION_PERCENT = 10
"""Percent of the second before a run in which the GPU computed, from which on others are taken to use it."""

MAX_IDLE_MEMORY_SHARE = 0.02
"""Share of a GPU's memory: as much may be in use before a run (the driver's own, say) without being others'."""


class NvmlGpu:
    """One GPU, asked through NVML.

    Parameters
    ----------
    device: torch.device
        As this process numbers it: CUDA is not initialised by asking for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._errors: dict[str, str] = {}
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, _find_handle(pynvml, device)
        except Exception as error:  # a fact that cannot be read is left out and said, never a reason to lose a run
            self._errors["all"] = str(error)

    def read_description(self) -> GpuInfo:
        """What it is and how it is set."""
        nvml, handle = self._nvml, self._handle
        return self._read_values(
            driver=lambda: decode_text(nvml.nvmlSystemGetDriverVersion()),
            cuda_driver=lambda: nvml.nvmlSystemGetCudaDriverVersion(),
            uuid=lambda: decode_text(nvml.nvmlDeviceGetUUID(handle)),
            power_limit_w=lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            sm_clock_max_mhz=lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_clock_max_mhz=lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
            ecc=lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
            mig=lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
            persistence=lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
            compute_mode=lambda: nvml.nvmlDeviceGetComputeMode(handle),
            pcie_generation=lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            pcie_width=lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        )

    def read_usage(self) -> GpuInfo:
        """Who uses it, and how much: asked before this process does."""
        nvml, handle = self._nvml, self._handle
        return self._read_values(
            used_bytes=self._read_used_bytes,
            total_bytes=lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            utilization=lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            processes=self._count_processes,
        )

    def read_state(self) -> GpuInfo:
        """Clocks, power, temperature, what holds clocks down, and how many compute: asked under load."""
        nvml, handle = self._nvml, self._handle
        return self._read_values(
            sm_clock_mhz=lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            power_w=lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_c=lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=self._read_throttle_reasons,
            pcie_generation=lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            processes=self._count_processes,
        )

    @property
    def read_errors(self) -> dict[str, str]:
        """What could not be read, and why."""
        return dict(self._errors)

    def _read_values(self, **readers: Callable[[], Any]) -> GpuInfo:
        if self._nvml is None:
            return {}
        values: GpuInfo = {}
        for name, read_value in readers.items():
            try:
                values[name] = read_value()
            except Exception as error:
                self._errors[name] = str(error) or type(error).__name__
        return values

    def _read_used_bytes(self) -> int:
        """Without what the driver reserves for itself, where NVML tells that from what is used."""
        memory_version = getattr(self._nvml, "nvmlMemory_v2", None)
        try:
            memory_info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=memory_version)
        except Exception:
            memory_info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(memory_info.used)

    def _count_processes(self) -> int:
        """Processes that compute on it, this one included; within a container NVML may see none."""
        return len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))

    def _read_throttle_reasons(self) -> list[str]:
        """By the name that drivers have known since 535, else by the older one."""
        try:
            reason_bits = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        except Exception:
            reason_bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return [name for bit, name in THROTTLE_REASON_BY_BIT.items() if reason_bits & bit]


def _find_handle(nvml: Any, device: torch.device) -> Any:
    """NVML's handle of a device. torch knows its number, unless it is a part of a GPU (MIG), which has only a name."""
    import torch

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device_index = device.index or 0
    if device_index < len(visible_devices) and visible_devices[device_index].startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(visible_devices[device_index])
    return nvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))


class GpuStateProbe:
    """Asks how a rank's GPUs, if any, are in the middle of the timed steps and right after the last was launched."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [NvmlGpu(device) for device in devices if device.type == "cuda"]
        self._states: list[GpuInfo] = []
        self._reader_thread: threading.Thread | None = None

    def start_midpoint_read(self) -> None:
        """Ask in a thread of its own, beside the steps: NVML may take milliseconds, and is waited for without the
        interpreter's lock."""
        if not self._gpus:
            return
        self._reader_thread = threading.Thread(target=self._read_states, args=("half",), daemon=True)
        self._reader_thread.start()

    def read_at_end(self) -> list[GpuInfo]:
        """Ask while the device still computes what was launched. All answers: ``when``, ``gpu`` and its state."""
        if self._reader_thread is not None:
            self._reader_thread.join()
        self._read_states("end")
        return self._states

    def _read_states(self, when: str) -> None:
        for gpu_index, gpu in enumerate(self._gpus):
            state = gpu.read_state()
            if state:
                self._states.append({"when": when, "gpu": gpu_index, **state})


def compute_others_memory_bytes(usage_before: GpuInfo) -> int:
    """Bytes of a GPU's memory that were in use before the run, beyond what may be nobody's."""
    used_bytes, total_bytes = usage_before.get("used_bytes", 0), usage_before.get("total_bytes", 0)
    return used_bytes if used_bytes > MAX_IDLE_MEMORY_SHARE * total_bytes else 0


def compute_taken_bytes(usage_before: GpuInfo, limit_bytes: int | None) -> int:
    """Bytes in use by others before a run that it would have needed to have all it was allowed (None: all there is)."""
    total_bytes, used_bytes = usage_before.get("total_bytes", 0), compute_others_memory_bytes(usage_before)
    return used_bytes if used_bytes and (limit_bytes is None or limit_bytes > total_bytes - used_bytes) else 0


def count_other_processes(usage_before: GpuInfo, states: list[GpuInfo]) -> int:
    """Other processes on a GPU: those that were there before, and those that came besides this run's own."""
    processes_before = usage_before.get("processes", 0)
    return max([processes_before, *(state["processes"] - 1 for state in states if "processes" in state)])


def find_gpu_degradations(usage_before: GpuInfo, states: list[GpuInfo]) -> list[str]:
    """Why a time is doubtful, from how a GPU was used before and how it was under load.

    Others that were there before and only hold memory do not slow a run; a GPU that is held back by heat or its power
    supply is slower than others of its kind.
    """
    degradations = []
    is_shared = usage_before.get("processes", 0) > 0 or compute_others_memory_bytes(usage_before) > 0
    if is_shared and usage_before.get("utilization", 0) >= MIN_BUSY_UTILIZATION_PERCENT:
        degradations.append("other processes computed on the GPU")
    if count_other_processes(usage_before, states) > usage_before.get("processes", 0):
        degradations.append("another process began to use the GPU")
    reasons = {
        reason
        for state in states
        for reason in state.get("throttle_reasons", ())
        if reason in DEGRADING_THROTTLE_REASONS
    }
    return degradations + [f"the GPU was held back: {reason}" for reason in sorted(reasons)]
