"""What torch and the driver say of this machine's GPUs, NVIDIA's or AMD's. Asking them starts CUDA, or ROCm: see
`bench.core.processes`."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEVICE_FOLDER = Path("/dev")
"""Where the driver has a file ``nvidia0`` for its first GPU, and so on."""


@dataclass(frozen=True)
class VisibleGpu:
    """One GPU, or one MIG slice of one, as CUDA describes it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    """All that CUDA can give out, less than NVML counts."""
    pci_address: str
    """Domain, bus and device: the same for all slices of a GPU."""


@dataclass(frozen=True)
class GpuUsage:
    """How much others use a GPU, by NVML; None for what it cannot say."""

    processes: int | None
    busy_percent: int | None
    used_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class CudaSetup:
    """All of it. Plain values, so that they can be sent between processes."""

    torch_version: str
    cuda_build: str | None
    """CUDA that torch was built for, such as 13.0."""
    rocm_build: str | None = None
    """ROCm that torch was built for, such as 6.4: its GPUs are AMD's."""
    cuda_architectures: tuple[str, ...] = ()
    """That torch was built for: sm_80 is machine code, compute_90 can be compiled for what is newer."""
    cpu_architecture: str = "x86_64"
    driver_version: str | None = None
    driver_cuda: int | None = None
    """Newest CUDA of the driver: 12020 is 12.2."""
    installed_gpu_names: tuple[str, ...] = ()
    """Names of all GPUs that NVML knows, hidden ones too; where it is silent, "a GPU" for each of the driver's."""
    all_gpus_hidden: bool = False
    """CUDA_VISIBLE_DEVICES leaves none."""
    visible_gpus: tuple[VisibleGpu, ...] = ()
    """That CUDA shows this process, in its order."""
    failure: str | None = None
    """Why CUDA could not be started."""
    usage_by_pci_address: dict[str, GpuUsage] = field(default_factory=dict)
    """By PCI address, before this process touched them."""


def query_cuda_setup() -> CudaSetup:
    """Ask NVML, then start CUDA in this process."""
    import torch

    values: dict[str, Any] = {
        "torch_version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "rocm_build": torch.version.hip,
        "cpu_architecture": platform.machine(),
        **_query_nvml(),
    }
    if torch.version.cuda is None and torch.version.hip is None:
        return CudaSetup(**values)
    if "installed_gpu_names" not in values:
        values["installed_gpu_names"] = ("a GPU",) * len(list(DEVICE_FOLDER.glob("nvidia[0-9]*")))
    if torch.version.hip is not None:  # the number of hidden GPUs is not asked
        values["installed_gpu_names"] = ("a GPU",) * torch.cuda.device_count()
        values["all_gpus_hidden"] = not values["installed_gpu_names"]
    else:
        values["all_gpus_hidden"] = torch.cuda._device_count_nvml() == 0 and bool(values["installed_gpu_names"])
    try:
        torch.cuda.init()
        values["cuda_architectures"] = tuple(torch.cuda.get_arch_list())
        properties: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        values["visible_gpus"] = tuple(
            VisibleGpu(
                gpu_properties.name,
                (gpu_properties.major, gpu_properties.minor),
                gpu_properties.total_memory,
                _format_pci_address(
                    gpu_properties.pci_domain_id, gpu_properties.pci_bus_id, gpu_properties.pci_device_id
                ),
            )
            for gpu_properties in properties
        )
    except Exception as error:
        values["failure"] = " ".join(str(error).split())
    return CudaSetup(**values)


def _query_nvml() -> dict[str, Any]:
    """Driver, GPUs and their use; empty where there is no NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:
        return {}
    return {
        "driver_version": _query_or_none(lambda: decode_text(pynvml.nvmlSystemGetDriverVersion())),
        "driver_cuda": _query_or_none(pynvml.nvmlSystemGetCudaDriverVersion),
        "installed_gpu_names": tuple(
            _query_or_none(lambda handle=handle: decode_text(pynvml.nvmlDeviceGetName(handle))) or "a GPU"
            for handle in handles
        ),
        "usage_by_pci_address": dict(_query_gpu_usage(pynvml, handles)),
    }


def _query_gpu_usage(nvml: Any, handles: list[Any]) -> Iterator[tuple[str, GpuUsage]]:
    for handle in handles:
        pci_info = _query_or_none(lambda handle=handle: nvml.nvmlDeviceGetPciInfo(handle))
        if pci_info is None:
            continue
        memory = _query_or_none(lambda handle=handle: nvml.nvmlDeviceGetMemoryInfo(handle))
        utilization = _query_or_none(lambda handle=handle: nvml.nvmlDeviceGetUtilizationRates(handle))
        processes = _query_or_none(lambda handle=handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        yield (
            _format_pci_address(pci_info.domain, pci_info.bus, pci_info.device),
            GpuUsage(
                None if processes is None else len(processes),
                None if utilization is None else int(utilization.gpu),
                None if memory is None else int(memory.used),
                None if memory is None else int(memory.total),
            ),
        )


def _format_pci_address(domain: int, bus: int, device: int) -> str:
    return f"{domain:08x}:{bus:02x}:{device:02x}"


def _query_or_none(query: Any) -> Any:
    """An answer of NVML's; None to a question that this GPU or driver does not know."""
    with contextlib.suppress(Exception):
        return query()
    return None


def decode_text(name: str | bytes) -> str:
    """A name from NVML, which older bindings give as bytes."""
    return name.decode() if isinstance(name, bytes) else name
