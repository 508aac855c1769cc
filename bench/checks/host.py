"""What machine this is, and whether it is free when the check is over."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from bench.checks.runs import CheckResult
from bench.core.units import MIB
from bench.hardware.detect import DetectedDevice
from bench.rank.machine_load import NvmlGpu

TOKEN_VARIABLE = "BENCH_CHECK"
"""Environment variable by which the processes of a check are known: all that it starts inherit it."""

MAX_LEFTOVER_BYTES = 256 * MIB
"""How much more of a GPU's memory may be in use after the check than before it."""


def describe_machine(device: DetectedDevice) -> CheckResult:
    """Device, driver and torch: whether they go together was found out when the device was detected."""
    torch_build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    capability = ".".join(map(str, device.capability)) if device.capability else ""
    count_text = f"{device.count} x " if device.count else ""
    descriptions = [f"{count_text}{device.name}", f"torch {torch.__version__} ({torch_build})"]
    descriptions += [f"compute capability {capability}"] if capability else []
    descriptions += [f"driver {driver}"] if (driver := read_driver_version()) else []
    if device.unusable_reason is not None:
        return CheckResult.from_outcome("machine", False, device.unusable_reason, "GPUs that can be used")
    return CheckResult.from_outcome("machine", True, ", ".join(descriptions), "")


def read_driver_version() -> str:
    """Of NVIDIA's driver; empty where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def read_used_bytes(device: DetectedDevice) -> dict[int, int]:
    """Memory in use, by anybody, on every visible GPU of which NVML says it, by its number; nothing on a CPU."""
    gpu_indices = range(device.count) if device.kind == "cuda" else ()
    usage_by_gpu = {gpu_index: NvmlGpu(torch.device("cuda", gpu_index)).read_usage() for gpu_index in gpu_indices}
    return {gpu_index: usage["used_bytes"] for gpu_index, usage in usage_by_gpu.items() if "used_bytes" in usage}


def find_leftover_processes(token: str) -> list[int]:
    """Process ids of this machine, but for this process and its parents, that have the check's token."""
    token_entry = f"{TOKEN_VARIABLE}={token}".encode()
    process_ids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and token_entry in (entry / "environ").read_bytes().split(b"\0"):
                process_ids.append(int(entry.name))
        except OSError:
            continue
    return process_ids


def check_device_free(device: DetectedDevice, token: str, used_before: dict[int, int]) -> CheckResult:
    """No process of the check is left, and no memory of a GPU."""
    leftover_processes = find_leftover_processes(token)
    extra_bytes = [
        used_after - used_before[gpu_index]
        for gpu_index, used_after in read_used_bytes(device).items()
        if gpu_index in used_before
    ]
    leftover_bytes = max(extra_bytes, default=0)
    found_text = f"{len(leftover_processes)} processes left" + (
        f", {leftover_bytes / MIB:,.0f} MiB more in use" if extra_bytes else ""
    )
    expected_text = "none" + (f", and no more than {MAX_LEFTOVER_BYTES / MIB:.0f} MiB" if extra_bytes else "")
    return CheckResult.from_outcome(
        "device free afterwards",
        not leftover_processes and leftover_bytes <= MAX_LEFTOVER_BYTES,
        found_text,
        expected_text,
    )
