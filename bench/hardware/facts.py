"""What torch and NVIDIA's driver say of this machine's GPUs. Asking them starts CUDA: see `bench.processes`."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEVICES = Path("/dev")
"""Where the driver has a file ``nvidia0`` for its first GPU, and so on."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice of one, as CUDA describes it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    """All that CUDA can give out, less than NVML counts."""
    pci: str
    """Domain, bus and device: the same for all slices of a GPU."""


@dataclass(frozen=True)
class Usage:
    """How much others use a GPU, by NVML; None for what it cannot say."""

    processes: int | None
    busy_percent: int | None
    used_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class GpuFacts:
    """All of it. Plain values, so that they can be sent between processes."""

    torch_version: str
    cuda_build: str | None
    """CUDA that torch was built for, such as 13.0."""
    rocm_build: str | None = None
    architectures: tuple[str, ...] = ()
    """That torch was built for: sm_80 is machine code, compute_90 can be compiled for what is newer."""
    machine: str = "x86_64"
    driver: str | None = None
    driver_cuda: int | None = None
    """Newest CUDA of the driver: 12020 is 12.2."""
    present: tuple[str, ...] = ()
    """Names of all GPUs that NVML knows, hidden ones too; where it is silent, "a GPU" for each of the driver's."""
    hidden: bool = False
    """CUDA_VISIBLE_DEVICES leaves none."""
    gpus: tuple[Gpu, ...] = ()
    """That CUDA shows this process, in its order."""
    failure: str | None = None
    """Why CUDA could not be started."""
    usage: dict[str, Usage] = field(default_factory=dict)
    """By PCI address, before this process touched them."""


def gather() -> GpuFacts:
    """Ask NVML, then start CUDA in this process."""
    import torch

    facts: dict[str, Any] = {
        "torch_version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "rocm_build": torch.version.hip,
        "machine": platform.machine(),
        **_ask_nvml(),
    }
    if torch.version.cuda is None:
        return GpuFacts(**facts)
    if "present" not in facts:
        facts["present"] = ("a GPU",) * len(list(DEVICES.glob("nvidia[0-9]*")))
    facts["hidden"] = torch.cuda._device_count_nvml() == 0 and bool(facts["present"])
    try:
        torch.cuda.init()
        facts["architectures"] = tuple(torch.cuda.get_arch_list())
        properties: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        facts["gpus"] = tuple(
            Gpu(
                each.name,
                (each.major, each.minor),
                each.total_memory,
                _address(each.pci_domain_id, each.pci_bus_id, each.pci_device_id),
            )
            for each in properties
        )
    except Exception as error:
        facts["failure"] = " ".join(str(error).split())
    return GpuFacts(**facts)


def _ask_nvml() -> dict[str, Any]:
    """Driver, GPUs and their use; empty where there is no NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:
        return {}
    return {
        "driver": _said(lambda: as_text(pynvml.nvmlSystemGetDriverVersion())),
        "driver_cuda": _said(pynvml.nvmlSystemGetCudaDriverVersion),
        "present": tuple(
            _said(lambda each=each: as_text(pynvml.nvmlDeviceGetName(each))) or "a GPU" for each in handles
        ),
        "usage": dict(_usages(pynvml, handles)),
    }


def _usages(nvml: Any, handles: list[Any]) -> Iterator[tuple[str, Usage]]:
    for handle in handles:
        pci = _said(lambda handle=handle: nvml.nvmlDeviceGetPciInfo(handle))
        if pci is None:
            continue
        memory = _said(lambda handle=handle: nvml.nvmlDeviceGetMemoryInfo(handle))
        busy = _said(lambda handle=handle: nvml.nvmlDeviceGetUtilizationRates(handle))
        running = _said(lambda handle=handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        yield (
            _address(pci.domain, pci.bus, pci.device),
            Usage(
                None if running is None else len(running),
                None if busy is None else int(busy.gpu),
                None if memory is None else int(memory.used),
                None if memory is None else int(memory.total),
            ),
        )


def _address(domain: int, bus: int, device: int) -> str:
    return f"{domain:08x}:{bus:02x}:{device:02x}"


def _said(ask: Any) -> Any:
    """An answer of NVML's; None to a question that this GPU or driver does not know."""
    with contextlib.suppress(Exception):
        return ask()
    return None


def as_text(name: str | bytes) -> str:
    """A name from NVML, which older bindings give as bytes."""
    return name.decode() if isinstance(name, bytes) else name
