"""What machine this is, and whether it is free when the check is over."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from bench.checks.result import Result
from bench.hardware.detect import Device
from bench.measure.gpu import Gpu

VARIABLE = "BENCH_CHECK"
"""Environment variable by which the processes of a check are known: all that it starts inherit it."""

FREE_WITHIN_BYTES = 256 * 2**20
"""How much more of a GPU's memory may be in use after the check than before it."""


def describe_machine(device: Device) -> Result:
    """Device, driver and torch: whether they go together was found out when the device was detected."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    capability = ".".join(map(str, device.capability)) if device.capability else ""
    many = f"{device.count} x " if device.count else ""
    found = [f"{many}{device.name}", f"torch {torch.__version__} ({build})"]
    found += [f"compute capability {capability}"] if capability else []
    found += [f"driver {driver}"] if (driver := driver_version()) else []
    if device.unusable is not None:
        return Result.of("machine", False, device.unusable, "GPUs that can be used")
    return Result.of("machine", True, ", ".join(found), "")


def driver_version() -> str:
    """Of NVIDIA's driver; empty where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def used_bytes(device: Device) -> dict[int, int]:
    """Memory in use, by anybody, on every visible GPU of which NVML says it, by its number; nothing on a CPU."""
    numbers = range(device.count) if device.kind == "cuda" else ()
    said = {number: Gpu(torch.device("cuda", number)).use() for number in numbers}
    return {number: use["used_bytes"] for number, use in said.items() if "used_bytes" in use}


def left_processes(token: str) -> list[int]:
    """Process ids of this machine, but for this process and its parents, that have the check's token."""
    wanted = f"{VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def check_free(device: Device, token: str, before: dict[int, int]) -> Result:
    """No process of the check is left, and no memory of a GPU."""
    left = left_processes(token)
    more = [after - before[number] for number, after in used_bytes(device).items() if number in before]
    kept = max(more, default=0)
    found = f"{len(left)} processes left" + (f", {kept / 2**20:,.0f} MiB more in use" if more else "")
    expected = "none" + (f", and no more than {FREE_WITHIN_BYTES / 2**20:.0f} MiB" if more else "")
    return Result.of("device free afterwards", not left and kept <= FREE_WITHIN_BYTES, found, expected)
