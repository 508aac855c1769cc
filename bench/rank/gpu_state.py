"""What NVML says of a rank's GPU: what it is, how it is set, and how it is under load.

Every question is asked by itself: what a driver, a virtual GPU or an older binding does not answer is left out, and all
else is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.hardware.facts import decode_text

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
