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

from bench.hardware.facts import as_text

Facts = dict[str, Any]

THROTTLE_REASONS = {
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

SLOWED_BY = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")
"""Reasons for which a GPU is slower than others of its kind. At its power cap every GPU of a kind is alike."""

BUSY_UTILIZATION = 10
"""Percent of the second before a run in which the GPU computed, from which on others are taken to use it."""

USED_SHARE = 0.02
"""Share of a GPU's memory: as much may be in use before a run (the driver's own, say) without being others'."""


class Gpu:
    """One GPU, asked through NVML.

    Parameters
    ----------
    device: torch.device
        As this process numbers it: CUDA is not initialised by asking for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._unanswered: dict[str, str] = {}
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, _handle(pynvml, device)
        except Exception as error:  # a fact that cannot be read is left out and said, never a reason to lose a run
            self._unanswered["all"] = str(error)

    def description(self) -> Facts:
        """What it is and how it is set."""
        nvml, handle = self._nvml, self._handle
        return self._answers(
            driver=lambda: as_text(nvml.nvmlSystemGetDriverVersion()),
            cuda_driver=lambda: nvml.nvmlSystemGetCudaDriverVersion(),
            uuid=lambda: as_text(nvml.nvmlDeviceGetUUID(handle)),
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

    def use(self) -> Facts:
        """Who uses it, and how much: asked before this process does."""
        nvml, handle = self._nvml, self._handle
        return self._answers(
            used_bytes=self._used_bytes,
            total_bytes=lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            utilization=lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            processes=self._processes,
        )

    def state(self) -> Facts:
        """Clocks, power, temperature, what holds clocks down, and how many compute: asked under load."""
        nvml, handle = self._nvml, self._handle
        return self._answers(
            sm_clock_mhz=lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            power_w=lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_c=lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=self._throttle_reasons,
            pcie_generation=lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            processes=self._processes,
        )

    @property
    def unanswered(self) -> dict[str, str]:
        """What could not be read, and why."""
        return dict(self._unanswered)

    def _answers(self, **questions: Callable[[], Any]) -> Facts:
        if self._nvml is None:
            return {}
        answers: Facts = {}
        for name, ask in questions.items():
            try:
                answers[name] = ask()
            except Exception as error:
                self._unanswered[name] = str(error) or type(error).__name__
        return answers

    def _used_bytes(self) -> int:
        """Without what the driver reserves for itself, where NVML tells that from what is used."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        try:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=version)
        except Exception:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(found.used)

    def _processes(self) -> int:
        """Processes that compute on it, this one included; within a container NVML may see none."""
        return len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))

    def _throttle_reasons(self) -> list[str]:
        """By the name that drivers have known since 535, else by the older one."""
        try:
            bits = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        except Exception:
            bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def _handle(nvml: Any, device: torch.device) -> Any:
    """NVML's handle of a device. torch knows its number, unless it is a part of a GPU (MIG), which has only a name."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = device.index or 0
    if number < len(visible) and visible[number].startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(visible[number])
    return nvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))


class GpuWatch:
    """Asks how a rank's GPUs, if any, are in the middle of the timed steps and right after the last was launched."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [Gpu(device) for device in devices if device.type == "cuda"]
        self._states: list[Facts] = []
        self._asking: threading.Thread | None = None

    def at_half(self) -> None:
        """Ask in a thread of its own, beside the steps: NVML may take milliseconds, and is waited for without the
        interpreter's lock."""
        if not self._gpus:
            return
        self._asking = threading.Thread(target=self._ask, args=("half",), daemon=True)
        self._asking.start()

    def at_end(self) -> list[Facts]:
        """Ask while the device still computes what was launched. All answers: ``when``, ``gpu`` and its state."""
        if self._asking is not None:
            self._asking.join()
        self._ask("end")
        return self._states

    def _ask(self, when: str) -> None:
        for number, gpu in enumerate(self._gpus):
            state = gpu.state()
            if state:
                self._states.append({"when": when, "gpu": number, **state})


def used_by_others(before: Facts) -> int:
    """Bytes of a GPU's memory that were in use before the run, beyond what may be nobody's."""
    used, total = before.get("used_bytes", 0), before.get("total_bytes", 0)
    return used if used > USED_SHARE * total else 0


def taken_from(before: Facts, limit_bytes: int | None) -> int:
    """Bytes in use by others before a run that it would have needed to have all it was allowed (None: all there is)."""
    total, used = before.get("total_bytes", 0), used_by_others(before)
    return used if used and (limit_bytes is None or limit_bytes > total - used) else 0


def others_on(before: Facts, states: list[Facts]) -> int:
    """Other processes on a GPU: those that were there before, and those that came besides this run's own."""
    there = before.get("processes", 0)
    return max([there, *(state["processes"] - 1 for state in states if "processes" in state)])


def gpu_doubts(before: Facts, states: list[Facts]) -> list[str]:
    """Why a time is doubtful, from how a GPU was used before and how it was under load.

    Others that were there before and only hold memory do not slow a run; a GPU that is held back by heat or its power
    supply is slower than others of its kind.
    """
    doubts = []
    shared = before.get("processes", 0) > 0 or used_by_others(before) > 0
    if shared and before.get("utilization", 0) >= BUSY_UTILIZATION:
        doubts.append("other processes computed on the GPU")
    if others_on(before, states) > before.get("processes", 0):
        doubts.append("another process began to use the GPU")
    reasons = {reason for state in states for reason in state.get("throttle_reasons", ()) if reason in SLOWED_BY}
    return doubts + [f"the GPU was held back: {reason}" for reason in sorted(reasons)]
