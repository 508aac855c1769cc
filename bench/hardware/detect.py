"""Which device this machine has, and why it cannot be used if it cannot; CUDA is started in a child to find out."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shutil
import sysconfig
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from bench.core import processes
from bench.core.errors import ImpossibleError
from bench.core.installation import read_torch_version
from bench.core.precision import Precision
from bench.core.units import GIB
from bench.hardware import facts
from bench.hardware.description import MEMORY_SLACK_SHARE, Hardware
from bench.hardware.facts import CudaSetup, VisibleGpu

MIN_FP8_CAPABILITY = {"cuda": (8, 9), "rocm": (9, 4)}
"""From which compute capability on a GPU multiplies in FP8 (``torch._scaled_mm``): of AMD's gfx94, the MI300."""

MIN_BF16_CAPABILITY = {"cuda": (8, 0), "rocm": (9, 0)}
"""The same of BF16: of AMD's gfx90, the MI200."""


MIN_DRIVER_BY_CUDA_MAJOR = {12: 525, 13: 580}
"""NVIDIA's oldest driver for each major version of CUDA, on which builds for all its minor versions run
(docs.nvidia.com/deploy/cuda-compatibility)."""

WHEEL_INDEX_URL = "https://download.pytorch.org/whl"

DRIVER_QUERY_TIMEOUT_S = 120.0
"""How long the driver may take to describe its GPUs."""

MIN_BUSY_PERCENT, MIN_TAKEN_BYTES = 10, 2 * GIB
"""From when on a GPU counts as used by others: a driver alone takes some hundred MiB."""


@dataclass(frozen=True)
class DetectedDevice:
    """The device of this machine: its kind, the name it reports, how many there are."""

    kind: str
    """cpu, cuda for NVIDIA's GPUs, rocm for AMD's."""
    name: str
    count: int
    capability: tuple[int, int] | None = None
    """CUDA compute capability, of AMD's GPUs the first digits of their architecture (gfx942 is 9.4); None on CPU."""
    memory_bytes: int | None = None
    """Memory of one GPU that CUDA can give out, None on CPU."""
    unusable_reason: str | None = None
    """Why the GPUs of this machine cannot be used, in a sentence; None if they can, or if there are none."""
    messages: tuple[str, ...] = ()
    """Sentences to say before something is measured."""

    @property
    def torch_device(self) -> str:
        """PyTorch's type of the device: cpu, or cuda, which AMD's GPUs are too."""
        return "cpu" if self.kind == "cpu" else "cuda"


@functools.cache
def detect_device() -> DetectedDevice:
    """The GPUs of this machine if torch was built for them, else its processor.

    A machine is taken to have one kind of GPU, that of the first visible one. For a CPU `count` is 0: processes are not
    bound to devices.
    """
    version = read_torch_version()
    build = version["__version__"], version["cuda"], version["hip"]
    try:
        if processes.can_reach_gpus():
            with processes.open_worker_pool(1) as pool:
                cuda_setup = pool.submit(facts.query_cuda_setup).result(DRIVER_QUERY_TIMEOUT_S)
        elif processes.has_gpu_driver():
            cuda_setup = facts.query_cuda_setup()
        else:
            cuda_setup = CudaSetup(*build)
    except (TimeoutError, BrokenProcessPool):
        failure = (
            f"CUDA did not start: the process that asked it did not answer within {DRIVER_QUERY_TIMEOUT_S:g} s, or "
            "crashed"
        )
        cuda_setup = CudaSetup(*build, installed_gpu_names=("a GPU",), failure=failure)
    return choose_device(cuda_setup)


def choose_device(cuda_setup: CudaSetup) -> DetectedDevice:
    """The device to take, from what is known of the machine."""
    cpu_device = DetectedDevice("cpu", read_processor_name(), 0)
    if cuda_setup.rocm_build is not None:
        return _choose_rocm_device(cuda_setup, cpu_device)
    if cuda_setup.cuda_build is None:
        if not cuda_setup.installed_gpu_names:
            return cpu_device
        reason = (
            f"torch {cuda_setup.torch_version} is built without CUDA "
            f"({_format_install_command(cuda_setup, _find_wheel(cuda_setup))} has it)"
        )
        message = (
            f"The {_format_counts(cuda_setup.installed_gpu_names)} of this machine are not used, runs are on its CPU: "
            f"{reason}."
        )
        return dataclasses.replace(cpu_device, unusable_reason=reason, messages=(message,))
    if cuda_setup.all_gpus_hidden or not (cuda_setup.installed_gpu_names or cuda_setup.visible_gpus):
        return cpu_device
    if not cuda_setup.visible_gpus:
        return DetectedDevice(
            "cuda",
            cuda_setup.installed_gpu_names[0],
            len(cuda_setup.installed_gpu_names),
            unusable_reason=_describe_start_failure(cuda_setup),
        )
    first_gpu = cuda_setup.visible_gpus[0]
    messages = tuple(filter(None, [_describe_mig(cuda_setup), _describe_usage(cuda_setup)]))
    device = DetectedDevice(
        "cuda",
        first_gpu.name,
        len(cuda_setup.visible_gpus),
        first_gpu.capability,
        first_gpu.memory_bytes,
        messages=messages,
    )
    if cuda_setup.cuda_architectures and not any(
        _can_run_on(architecture, first_gpu.capability) for architecture in cuda_setup.cuda_architectures
    ):
        return dataclasses.replace(device, unusable_reason=_describe_missing_kernels(cuda_setup, first_gpu))
    return device


def _choose_rocm_device(cuda_setup: CudaSetup, cpu_device: DetectedDevice) -> DetectedDevice:
    """AMD's GPU of a torch that was built for ROCm, else the processor."""
    if cuda_setup.visible_gpus:
        first_gpu = cuda_setup.visible_gpus[0]
        return DetectedDevice(
            "rocm", first_gpu.name, len(cuda_setup.visible_gpus), first_gpu.capability, first_gpu.memory_bytes
        )
    if cuda_setup.failure is None or not cuda_setup.installed_gpu_names:
        return cpu_device
    reason = f"ROCm cannot be started: {cuda_setup.failure}"
    return DetectedDevice(
        "rocm", cuda_setup.installed_gpu_names[0], len(cuda_setup.installed_gpu_names), unusable_reason=reason
    )


def _describe_start_failure(cuda_setup: CudaSetup) -> str:
    """Why CUDA did not start, and what to do."""
    built_major = int(str(cuda_setup.cuda_build).partition(".")[0])
    if cuda_setup.driver_cuda is None or cuda_setup.driver_cuda // 1000 >= built_major:
        return f"CUDA cannot be started: {cuda_setup.failure}"
    needed_driver = (
        f"{MIN_DRIVER_BY_CUDA_MAJOR[built_major]} or later"
        if built_major in MIN_DRIVER_BY_CUDA_MAJOR
        else f"for CUDA {built_major}"
    )
    older_wheel = _find_wheel(cuda_setup)
    return (
        f"torch {cuda_setup.torch_version} is built for CUDA {cuda_setup.cuda_build}, which needs NVIDIA's driver "
        f"{needed_driver}, and "
        f"this machine has {cuda_setup.driver_version} (CUDA "
        f"{cuda_setup.driver_cuda // 1000}.{cuda_setup.driver_cuda % 1000 // 10}): "
        f"update the driver{f', or {_format_install_command(cuda_setup, older_wheel)}' if older_wheel else ''}"
    )


def _describe_missing_kernels(cuda_setup: CudaSetup, gpu: VisibleGpu) -> str:
    architectures = ", ".join(cuda_setup.cuda_architectures)
    matching_wheel = _find_wheel(cuda_setup, gpu.capability)
    return (
        f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}, and torch "
        f"{cuda_setup.torch_version} "
        f"has kernels for {architectures}"
        + (
            f": {_format_install_command(cuda_setup, matching_wheel)}"
            if matching_wheel
            else ", as have all builds of it"
        )
    )


def _can_run_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether kernels built for an architecture run on a GPU.

    Machine code (sm_86) runs on later GPUs of the same major version, intermediate code (compute_86) is compiled for
    any later one; what is built for one architecture alone (sm_90a) needs that one.
    """
    kind, _, number = architecture.partition("_")
    major, minor = int(number.rstrip("af")[:-1]), int(number.rstrip("af")[-1])
    if number.endswith("a"):
        return capability == (major, minor)
    if kind == "compute" and number.isdecimal():
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor


def _find_wheel(cuda_setup: CudaSetup, capability: tuple[int, int] | None = None) -> str | None:
    """CUDA version of a published build of torch for a machine's driver, and a GPU: torch's own table of its builds.

    Of several the newest one that is no newer than the driver's CUDA; the oldest one, if all of its major version are.
    """
    import torch

    cpu_architecture = "aarch64" if cuda_setup.cpu_architecture == "aarch64" else "x86_64"
    builds = {
        _encode_cuda_version(version): version
        for version, release_capabilities in getattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", {}).items()
        if capability is None
        or any(
            _can_run_on(f"sm_{capability_number}", capability)
            for capability_number in _get_release_capabilities(release_capabilities, cpu_architecture)
        )
    }
    newest_cuda = cuda_setup.driver_cuda or max(builds, default=0)
    supported_numbers = sorted(number for number in builds if number // 1000 <= newest_cuda // 1000)
    if not supported_numbers:
        return None
    return builds[max((number for number in supported_numbers if number <= newest_cuda), default=supported_numbers[0])]


def _get_release_capabilities(
    release_capabilities: Mapping[str, Collection[int]] | Collection[int], cpu_architecture: str
) -> Collection[int]:
    """Architectures of a build for a kind of processor; torch 2.11 knows but one list."""
    return (
        release_capabilities.get(cpu_architecture, ())
        if isinstance(release_capabilities, Mapping)
        else release_capabilities
    )


def _encode_cuda_version(version: str) -> int:
    """A version of CUDA as drivers count it: 12.6 is 12060."""
    major, _, minor = version.partition(".")
    return 1000 * int(major) + 10 * int(minor)


def _format_install_command(cuda_setup: CudaSetup, cuda: str | None) -> str:
    index_option = f" --index-url {WHEEL_INDEX_URL}/cu{cuda.replace('.', '')}" if cuda else ""
    return f"pip install torch=={cuda_setup.torch_version.partition('+')[0]}{index_option}"


def _describe_mig(cuda_setup: CudaSetup) -> str | None:
    if "MIG" not in cuda_setup.visible_gpus[0].name:
        return None
    return (
        f"{cuda_setup.visible_gpus[0].name}: CUDA shows a process one MIG device, so there is 1 GPU, however many are "
        "set up."
    )


def _describe_usage(cuda_setup: CudaSetup) -> str | None:
    """Which of the visible GPUs others use, and how much."""
    used_gpus = []
    for index, gpu in enumerate(cuda_setup.visible_gpus):
        usage = cuda_setup.usage_by_pci_address.get(gpu.pci_address)
        if usage is None:
            continue
        parts = []
        if usage.processes:
            parts.append(f"{usage.processes} process{'es' * (usage.processes > 1)}")
        if (usage.busy_percent or 0) >= MIN_BUSY_PERCENT:
            parts.append(f"{usage.busy_percent} % busy")
        if (usage.used_bytes or 0) >= MIN_TAKEN_BYTES or (parts and usage.used_bytes):
            parts.append(f"{(usage.used_bytes or 0) / GIB:.1f} GiB taken")
        if parts:
            used_gpus.append(f"GPU {index} ({', '.join(parts)})")
    if not used_gpus:
        return None
    return f"Others use {', '.join(used_gpus)}: runs beside them are slower and have less memory."


def _format_counts(names: Sequence[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def read_processor_name() -> str:
    """Name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


UNCOMPILED_SETTINGS = {"compile=true": "compile=false", "loss=compiled": "loss=whole"}
"""What asks for torch's compiler, and the same without it."""


def refuse_unsupported(
    hardware: Hardware, device: DetectedDevice, precision: Precision, *, compiling_setting: str | None = None
) -> None:
    """Raise `ImpossibleError` where this machine's device cannot do what a run asks of it.

    Parameters
    ----------
    compiling_setting: str, optional
        What of the run asks for torch's compiler, one of `UNCOMPILED_SETTINGS`; None where nothing does.
    """
    on_gpu = hardware.device != "cpu"
    if on_gpu and device.unusable_reason is not None:
        raise ImpossibleError(
            f"hardware={hardware.name} cannot be used here: {device.unusable_reason}. Or choose hardware=cpu."
        )
    if on_gpu and device.kind == "cpu":
        raise ImpossibleError(
            f"hardware={hardware.name} needs a GPU, and this machine has none: choose hardware=cpu or auto."
        )
    if on_gpu and not hardware.gpu_names and device.kind != hardware.device:
        vendor = "AMD's" if hardware.device == "rocm" else "NVIDIA's"
        raise ImpossibleError(
            f"hardware={hardware.name} describes a GPU of {vendor}, but this machine has {device.name}: choose "
            "hardware=auto."
        )
    if hardware.gpu_names and device.kind != "cpu" and device.name not in hardware.gpu_names:
        raise ImpossibleError(
            f"hardware={hardware.name} describes {' or '.join(hardware.gpu_names)}, but this machine has "
            f"{device.name}: choose hardware=auto (hardware.memory_limit_gib makes a larger GPU as small as you like)."
        )
    limit, memory = hardware.memory_limit_bytes, device.memory_bytes
    if limit is not None and memory is not None and limit > (1 + MEMORY_SLACK_SHARE) * memory:
        raise ImpossibleError(
            f"hardware.memory_limit_gib={hardware.memory_limit_gib:g} is more than {device.name} has: "
            f"choose at most {memory / GIB:.1f}, or null."
        )
    nominal_gb = hardware.memory_gb
    if memory is not None and nominal_gb is not None and not 0.85 < memory / (nominal_gb * 1e9) < 1.15:
        raise ImpossibleError(
            f"hardware.memory_gb={nominal_gb:g} is not what {device.name} has, {memory / GIB:.1f} GiB: choose "
            f"hardware.memory_limit_gib={nominal_gb:g} to use no more, or mode=predict for another device."
        )
    capability = device.capability or (0, 0)
    if precision.tf32 and not (hardware.device == "cuda" and capability >= (8, 0)):
        raise ImpossibleError(
            f"precision={precision.name} needs an NVIDIA GPU of compute capability 8.0 or later, "
            f"not {device.name}: choose fp32, bf16 or bf16_pure."
        )
    has_float8 = on_gpu and capability >= MIN_FP8_CAPABILITY[hardware.device]
    if precision.uses_float8 and not precision.float8_emulated and not has_float8:
        raise ImpossibleError(
            f"precision={precision.name} needs the FP8 tensor cores of an NVIDIA GPU of compute capability 8.9 or "
            f"later (H100, H200), or of AMD's MI300 and later, which {device.name} lacks: choose bf16, or "
            "precision.float8_emulated=true to see how accurate it is."
        )
    if precision.compute == "bf16" and on_gpu and capability < MIN_BF16_CAPABILITY[hardware.device]:
        required = "an MI200 or later" if hardware.device == "rocm" else "compute capability 8.0 or later"
        raise ImpossibleError(
            f"precision={precision.name} needs {required}, which {device.name} lacks: choose fp32 or fp16."
        )
    if compiling_setting is not None:
        _refuse_missing_compiler(compiling_setting, on_gpu)


def _refuse_missing_compiler(compiling_setting: str, on_gpu: bool) -> None:
    """Raise `ImpossibleError` without a compiler: inductor's for a CPU, that of Triton's launcher for a GPU."""
    language, compilers = ("C", ("gcc", "clang", "cc")) if on_gpu else ("C++", ("g++", "clang++"))
    if not any(map(shutil.which, (*compilers, os.environ.get("CC" if on_gpu else "CXX", "")))):
        missing = f"a {language} compiler ({' or '.join(compilers[:2])})"
    elif not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing = "Python's C headers (python3-dev)"
    else:
        return
    raise ImpossibleError(
        f"{compiling_setting} on a {'GPU' if on_gpu else 'CPU'} needs {missing}: install it, or choose "
        f"{UNCOMPILED_SETTINGS[compiling_setting]}."
    )
