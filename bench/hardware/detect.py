"""Which device this machine has, found without starting CUDA in this process.

A process that has started CUDA cannot fork ranks, so the driver is asked through NVML.
"""

from __future__ import annotations

import platform
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from bench.errors import ImpossibleError, UsageError
from bench.hardware.description import Hardware
from bench.precision import Precision

FP8_CAPABILITY = (8, 9)
"""From which compute capability on a GPU multiplies in FP8 (``torch._scaled_mm``)."""


@dataclass(frozen=True)
class Device:
    """The device of this machine: its kind, the name it reports, how many there are."""

    kind: str
    name: str
    count: int
    capability: tuple[int, int] | None = None
    """CUDA compute capability, None on CPU."""
    memory_bytes: int | None = None
    """Memory of one GPU, None on CPU."""


def detect() -> Device:
    """The GPUs of this machine if torch and the driver can use them, else its processor.

    A machine is taken to have one kind of GPU. For a CPU `count` is 0: processes are not bound to devices.

    Raises
    ------
    UsageError
        If torch can use GPUs that NVML cannot name.
    """
    import torch

    count = torch.cuda.device_count() if torch.version.cuda else 0  # through NVML; honours CUDA_VISIBLE_DEVICES
    if count == 0:
        return Device("cpu", processor_name(), 0)
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name, (major, minor) = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        memory_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except Exception as error:
        raise UsageError(f"torch sees {count} GPU(s), but NVML cannot name them ({error}): check nvidia-smi.") from None
    return Device("cuda", nvml_text(name), count, (int(major), int(minor)), int(memory_bytes))


def nvml_text(name: str | bytes) -> str:
    """A name from NVML, which older bindings give as bytes."""
    return name.decode() if isinstance(name, bytes) else name


def processor_name() -> str:
    """Name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def refuse_unsupported(hardware: Hardware, device: Device, precision: Precision, *, compile_blocks: bool) -> None:
    """Raise `ImpossibleError` where this machine's device cannot do what a run asks of it."""
    if hardware.device == "cuda" and device.kind != "cuda":
        raise ImpossibleError(
            f"hardware={hardware.name} needs a GPU, and this machine has none: choose hardware=cpu or auto."
        )
    if hardware.gpu_names and device.kind == "cuda" and device.name not in hardware.gpu_names:
        raise ImpossibleError(
            f"hardware={hardware.name} describes {' or '.join(hardware.gpu_names)}, but this machine has "
            f"{device.name}: choose hardware=auto (hardware.memory_limit_gib makes a larger GPU as small as you like)."
        )
    limit, memory = hardware.memory_limit_bytes, device.memory_bytes
    if limit is not None and memory is not None and limit > memory:
        raise ImpossibleError(
            f"hardware.memory_limit_gib={hardware.memory_limit_gib:g} is more than {device.name} has: "
            f"choose at most {memory / 2**30:.1f}, or null."
        )
    capability = device.capability or (0, 0)
    on_gpu = hardware.device == "cuda"
    if precision.tf32 and not (on_gpu and capability >= (8, 0)):
        raise ImpossibleError(
            f"precision={precision.name} needs an NVIDIA GPU of compute capability 8.0 or later, "
            f"not {device.name}: choose fp32, bf16 or bf16_pure."
        )
    if precision.in_float8 and not precision.float8_emulated and not (on_gpu and capability >= FP8_CAPABILITY):
        raise ImpossibleError(
            f"precision={precision.name} needs the FP8 tensor cores of an NVIDIA GPU of compute capability 8.9 or "
            f"later (H100, H200), which {device.name} lacks: choose bf16, or precision.float8_emulated=true to see how "
            "accurate it is."
        )
    if precision.compute == "bf16" and on_gpu and capability < (8, 0):
        raise ImpossibleError(
            f"precision={precision.name} needs compute capability 8.0 or later, which {device.name} lacks: "
            "choose fp32 or fp16."
        )
    if compile_blocks and not on_gpu:
        has_compiler = shutil.which("g++") or shutil.which("clang++")
        has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
        if not (has_compiler and has_headers):
            missing = "a C++ compiler (g++ or clang++)" if not has_compiler else "Python's C headers (python3-dev)"
            raise ImpossibleError(f"compile=true on a CPU needs {missing}: install it, or choose compile=false.")
