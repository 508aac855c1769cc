"""A pynvml that knows the fake CUDA's devices."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from tests.fakecuda.runtime import CAPABILITY, CUDA_VERSION, DEVICE_NAME, DRIVER_VERSION, FIRST_PCI_BUS, UUID, log_call

NUM_DEVICES = int(os.environ.get("FAKE_CUDA_DEVICES", "8"))
POWER_LIMIT_MW = 700_000
CLOCKS_MHZ = {"NVML_CLOCK_GRAPHICS": 1755, "NVML_CLOCK_SM": 1755, "NVML_CLOCK_MEM": 2619, "NVML_CLOCK_VIDEO": 1545}
MEMORY_BYTES, USED_BYTES = 81559 * 2**20, 600 * 2**20


def install() -> None:
    """Put it where ``import pynvml`` finds it: constants and errors are the true one's, what needs a driver is not."""
    import pynvml as real_pynvml

    uuids = [f"GPU-{UUID.format(number)}" for number in range(NUM_DEVICES)]
    clocks = {getattr(real_pynvml, name): clock for name, clock in CLOCKS_MHZ.items()}
    major, _, minor = CUDA_VERSION.partition(".")
    functions: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: DRIVER_VERSION,
        "nvmlSystemGetCudaDriverVersion": lambda: 1000 * int(major) + 10 * int(minor),
        "nvmlDeviceGetCount": lambda: NUM_DEVICES,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuids.index(uuid),
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetUUID": lambda handle: uuids[handle],
        "nvmlDeviceGetName": lambda handle: DEVICE_NAME,
        "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(domain=0, bus=FIRST_PCI_BUS + handle, device=0),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: CAPABILITY,
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: types.SimpleNamespace(
            total=MEMORY_BYTES, used=USED_BYTES, free=MEMORY_BYTES - USED_BYTES
        ),
        "nvmlDeviceGetUtilizationRates": _read_utilization,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: POWER_LIMIT_MW,
        "nvmlDeviceGetPowerUsage": lambda handle: 415_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 58,
        "nvmlDeviceGetClockInfo": lambda handle, which: clocks[which],
        "nvmlDeviceGetMaxClockInfo": lambda handle, which: clocks[which] + 225,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0,
        "nvmlDeviceGetPersistenceMode": lambda handle: 1,
        "nvmlDeviceGetComputeMode": lambda handle: 0,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlDeviceGetEccMode": lambda handle: [1, 1],
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
    }
    fake = types.ModuleType("pynvml")
    fake.__dict__.update({name: value for name, value in vars(real_pynvml).items() if not name.startswith("nvml")})
    fake.__dict__.update(functions)
    sys.modules["pynvml"] = fake


def _read_utilization(handle: int) -> types.SimpleNamespace:
    log_call(f"GPU {handle} asked for its use")
    return types.SimpleNamespace(gpu=0, memory=0)
