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

from bench import processes
from bench.errors import ImpossibleError
from bench.hardware import facts
from bench.hardware.description import SLACK, Hardware
from bench.hardware.facts import Gpu, GpuFacts
from bench.precision import Precision

FP8_CAPABILITY = (8, 9)
"""From which compute capability on a GPU multiplies in FP8 (``torch._scaled_mm``)."""


DRIVER_OF_CUDA = {12: 525, 13: 580}
"""NVIDIA's oldest driver for each major version of CUDA, on which builds for all its minor versions run
(docs.nvidia.com/deploy/cuda-compatibility)."""

WHEELS = "https://download.pytorch.org/whl"

ANSWER_S = 120.0
"""How long the driver may take to describe its GPUs."""

BUSY_PERCENT, TAKEN_BYTES = 10, 2 * 2**30
"""From when on a GPU counts as used by others: a driver alone takes some hundred MiB."""


@dataclass(frozen=True)
class Device:
    """The device of this machine: its kind, the name it reports, how many there are."""

    kind: str
    name: str
    count: int
    capability: tuple[int, int] | None = None
    """CUDA compute capability, None on CPU."""
    memory_bytes: int | None = None
    """Memory of one GPU that CUDA can give out, None on CPU."""
    unusable: str | None = None
    """Why the GPUs of this machine cannot be used, in a sentence; None if they can, or if there are none."""
    remarks: tuple[str, ...] = ()
    """Sentences to say before something is measured."""


@functools.cache
def detect() -> Device:
    """The GPUs of this machine if torch was built for them, else its processor.

    A machine is taken to have one kind of GPU, that of the first visible one. For a CPU `count` is 0: processes are not
    bound to devices.
    """
    import torch

    try:
        if processes.may_reach_gpus():
            with processes.worker_pool(1) as pool:
                found = pool.submit(facts.gather).result(ANSWER_S)
        elif processes.has_gpu_driver():
            found = facts.gather()
        else:
            found = GpuFacts(torch.__version__, torch.version.cuda)
    except (TimeoutError, BrokenProcessPool):
        words = f"CUDA did not start: the process that asked it did not answer within {ANSWER_S:g} s, or crashed"
        found = GpuFacts(torch.__version__, torch.version.cuda, present=("a GPU",), failure=words)
    return device_of(found)


def device_of(found: GpuFacts) -> Device:
    """The device to take, from what is known of the machine."""
    processor = Device("cpu", processor_name(), 0)
    if found.cuda_build is None:
        if not found.present or found.rocm_build is not None:
            return processor
        why = f"torch {found.torch_version} is built without CUDA ({_install(found, _wheel(found))} has it)"
        remark = f"The {_counted(found.present)} of this machine are not used, runs are on its CPU: {why}."
        return dataclasses.replace(processor, unusable=why, remarks=(remark,))
    if found.hidden or not (found.present or found.gpus):
        return processor
    if not found.gpus:
        return Device("cuda", found.present[0], len(found.present), unusable=_why_not_started(found))
    first = found.gpus[0]
    remarks = tuple(filter(None, [_mig_remark(found), _usage_remark(found)]))
    device = Device("cuda", first.name, len(found.gpus), first.capability, first.memory_bytes, remarks=remarks)
    if found.architectures and not any(_runs_on(code, first.capability) for code in found.architectures):
        return dataclasses.replace(device, unusable=_why_no_kernels(found, first))
    return device


def _why_not_started(found: GpuFacts) -> str:
    """Why CUDA did not start, and what to do."""
    built = int(str(found.cuda_build).partition(".")[0])
    if found.driver_cuda is None or found.driver_cuda // 1000 >= built:
        return f"CUDA cannot be started: {found.failure}"
    needed = f"{DRIVER_OF_CUDA[built]} or later" if built in DRIVER_OF_CUDA else f"for CUDA {built}"
    older = _wheel(found)
    return (
        f"torch {found.torch_version} is built for CUDA {found.cuda_build}, which needs NVIDIA's driver {needed}, and "
        f"this machine has {found.driver} (CUDA {found.driver_cuda // 1000}.{found.driver_cuda % 1000 // 10}): "
        f"update the driver{f', or {_install(found, older)}' if older else ''}"
    )


def _why_no_kernels(found: GpuFacts, gpu: Gpu) -> str:
    codes = ", ".join(found.architectures)
    fitting = _wheel(found, gpu.capability)
    return (
        f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}, and torch {found.torch_version} "
        f"has kernels for {codes}" + (f": {_install(found, fitting)}" if fitting else ", as have all builds of it")
    )


def _runs_on(code: str, capability: tuple[int, int]) -> bool:
    """Whether kernels built for an architecture run on a GPU.

    Machine code (sm_86) runs on later GPUs of the same major version, intermediate code (compute_86) is compiled for
    any later one; what is built for one architecture alone (sm_90a) needs that one.
    """
    kind, _, number = code.partition("_")
    major, minor = int(number.rstrip("af")[:-1]), int(number.rstrip("af")[-1])
    if number.endswith("a"):
        return capability == (major, minor)
    if kind == "compute" and number.isdecimal():
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor


def _wheel(found: GpuFacts, capability: tuple[int, int] | None = None) -> str | None:
    """CUDA version of a published build of torch for a machine's driver, and a GPU: torch's own table of its builds.

    Of several the newest one that is no newer than the driver's CUDA; the oldest one, if all of its major version are.
    """
    import torch

    machine = "aarch64" if found.machine == "aarch64" else "x86_64"
    builds = {
        _number(version): version
        for version, codes in getattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", {}).items()
        if capability is None or any(_runs_on(f"sm_{code}", capability) for code in _of_machine(codes, machine))
    }
    newest = found.driver_cuda or max(builds, default=0)
    on_driver = sorted(number for number in builds if number // 1000 <= newest // 1000)
    if not on_driver:
        return None
    return builds[max((number for number in on_driver if number <= newest), default=on_driver[0])]


def _of_machine(codes: Mapping[str, Collection[int]] | Collection[int], machine: str) -> Collection[int]:
    """Architectures of a build for a kind of processor; torch 2.11 knows but one list."""
    return codes.get(machine, ()) if isinstance(codes, Mapping) else codes


def _number(version: str) -> int:
    """A version of CUDA as drivers count it: 12.6 is 12060."""
    major, _, minor = version.partition(".")
    return 1000 * int(major) + 10 * int(minor)


def _install(found: GpuFacts, cuda: str | None) -> str:
    index = f" --index-url {WHEELS}/cu{cuda.replace('.', '')}" if cuda else ""
    return f"pip install torch=={found.torch_version.partition('+')[0]}{index}"


def _mig_remark(found: GpuFacts) -> str | None:
    if "MIG" not in found.gpus[0].name:
        return None
    return f"{found.gpus[0].name}: CUDA shows a process one MIG device, so there is 1 GPU, however many are set up."


def _usage_remark(found: GpuFacts) -> str | None:
    """Which of the visible GPUs others use, and how much."""
    used = []
    for index, gpu in enumerate(found.gpus):
        usage = found.usage.get(gpu.pci)
        if usage is None:
            continue
        parts = []
        if usage.processes:
            parts.append(f"{usage.processes} process{'es' * (usage.processes > 1)}")
        if (usage.busy_percent or 0) >= BUSY_PERCENT:
            parts.append(f"{usage.busy_percent} % busy")
        if (usage.used_bytes or 0) >= TAKEN_BYTES or (parts and usage.used_bytes):
            parts.append(f"{(usage.used_bytes or 0) / 2**30:.1f} GiB taken")
        if parts:
            used.append(f"GPU {index} ({', '.join(parts)})")
    if not used:
        return None
    return f"Others use {', '.join(used)}: runs beside them are slower and have less memory."


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


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
    if hardware.device == "cuda" and device.unusable is not None:
        raise ImpossibleError(
            f"hardware={hardware.name} cannot be used here: {device.unusable}. Or choose hardware=cpu."
        )
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
    if limit is not None and memory is not None and limit > (1 + SLACK) * memory:
        raise ImpossibleError(
            f"hardware.memory_limit_gib={hardware.memory_limit_gib:g} is more than {device.name} has: "
            f"choose at most {memory / 2**30:.1f}, or null."
        )
    sold = hardware.memory_gb
    if memory is not None and sold is not None and not 0.85 < memory / (sold * 1e9) < 1.15:
        raise ImpossibleError(
            f"hardware.memory_gb={sold:g} is not what {device.name} has, {memory / 2**30:.1f} GiB: choose "
            f"hardware.memory_limit_gib={sold:g} to use no more, or mode=predict for another device."
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
    if compile_blocks:
        _refuse_to_compile(on_gpu)


def _refuse_to_compile(on_gpu: bool) -> None:
    """Raise `ImpossibleError` without a compiler: inductor's for a CPU, that of Triton's launcher for a GPU."""
    language, compilers = ("C", ("gcc", "clang", "cc")) if on_gpu else ("C++", ("g++", "clang++"))
    if not any(map(shutil.which, (*compilers, os.environ.get("CC" if on_gpu else "CXX", "")))):
        missing = f"a {language} compiler ({' or '.join(compilers[:2])})"
    elif not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing = "Python's C headers (python3-dev)"
    else:
        return
    raise ImpossibleError(
        f"compile=true on a {'GPU' if on_gpu else 'CPU'} needs {missing}: install it, or choose compile=false."
    )
