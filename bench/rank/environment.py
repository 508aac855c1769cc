"""What a run ran on: versions, device, power limit and clocks, topology, commit."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench.core.installation import PACKAGE_FOLDER
from bench.hardware.detect import read_processor_name
from bench.rank.machine_load import NvmlGpu, format_ranges, list_usable_cpus

RECORDED_PACKAGES = (
    "torch",
    "transformers",
    "hydra-core",
    "omegaconf",
    "submitit",
    "numpy",
    "triton",
    "deepspeed",
    "peft",
    "bitsandbytes",
    "accelerate",
    "lightning",
    "torchao",
)

CODE_PATHS = ("bench", "conf", "pyproject.toml", "constraints.txt")
"""What of a checkout can change a result."""

COMMIT_FILE = "COMMIT.json"
"""In a copy of the code: the commit it was made from."""

RECORDED_VARIABLE_PREFIXES = (
    *("PYTORCH_", "TORCH", "ATEN_", "TRITON_", "INDUCTOR_", "CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_TF32_OVERRIDE"),
    *("NCCL_", "GLOO_", "UCC_", "UCX_", "FI_", "OFI_", "SHARP_", "NVSHMEM_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"),
    *("DS_", "DEEPSPEED_", "ACCELERATE_", "BNB_", "BITSANDBYTES_"),
)
"""Beginnings of the names of variables that can change a result: of torch and its compilers, of CUDA's libraries, of
communication, of a processor's libraries, of the frameworks."""

PATH_VARIABLE_PATTERN = re.compile(r"(HOME|ROOT|_PATH|_DIR|_CACHE)$")
"""In the name of a variable that only says where something lies: it is not recorded."""

HARMLESS_VARIABLE_PATTERN = re.compile(r"DEBUG|LOG|VERBOSE|VISIBLE_DEVICES|TORCHELASTIC|TIMEOUT")
"""In the name of a variable that is recorded, and changes no result."""

SECRET_VARIABLE_PATTERN = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|SIGNATURE|(?<!^NCCL_IB_P)KEY", re.IGNORECASE
)
"""In the name of a variable whose value is nobody's business. NCCL_IB_PKEY is the index of a partition of a network."""


@functools.cache
def describe_software() -> dict[str, Any]:
    """Versions of what computes, and the variables that steer it."""
    versions: dict[str, str | None] = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "packages": versions,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _find_nccl_version(),
        "kernel": platform.release(),
        "processor_cores": os.cpu_count(),
        "variables": select_recorded_variables(os.environ),
    }


def select_recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change a result, without those whose name says that their value is a secret."""
    prefixed_variables = {
        name: value for name, value in sorted(environment.items()) if name.startswith(RECORDED_VARIABLE_PREFIXES)
    }
    return {
        name: value
        for name, value in prefixed_variables.items()
        if not SECRET_VARIABLE_PATTERN.search(name) and not PATH_VARIABLE_PATTERN.search(name)
    }


def list_changed_variables(recorded: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Variables that can change a result and differ between a row and here, as ``NAME=there (here: value)``."""
    current_variables = select_recorded_variables(environment)
    names = sorted(name for name in {*recorded, *current_variables} if not HARMLESS_VARIABLE_PATTERN.search(name))
    recorded_texts = {name: f"{name}={recorded[name]}" if name in recorded else f"{name} unset" for name in names}
    return [
        f"{recorded_texts[name]} (here: {current_variables.get(name, 'unset')})"
        for name in names
        if recorded.get(name) != current_variables.get(name)
    ]


def _find_nccl_version() -> str | None:
    if torch.version.cuda is None:
        return None
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return None


@functools.cache
def find_commit() -> dict[str, Any]:
    """Commit of the code that runs, and whether code and configuration are as in it; None outside a git checkout."""
    root = PACKAGE_FOLDER.parent
    if (root / COMMIT_FILE).exists():
        commit_info: dict[str, Any] = json.loads((root / COMMIT_FILE).read_text())
        return commit_info

    def run_git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    sha = run_git("rev-parse", "HEAD") if (root / ".git").exists() else None
    return {"git_sha": sha, "git_clean": run_git("status", "--porcelain", "--", *CODE_PATHS) == "" if sha else None}


def get_host_name() -> str:
    return socket.gethostname()


def get_node_name() -> str:
    """Name of this machine as the cluster calls it, which may be a part of its host name."""
    return os.environ.get("SLURMD_NODENAME") or get_host_name()


def describe_devices(devices: Sequence[torch.device]) -> dict[str, Any]:
    """A rank's device as it reports itself; of several the first, and all under ``gpus``.

    What NVML does not answer is under ``nvml``.
    """
    first_device = devices[0]
    if first_device.type != "cuda":
        return {
            "name": read_processor_name(),
            "threads": torch.get_num_threads(),
            "processors": format_ranges(list_usable_cpus()),
        }
    gpu_descriptions = [_describe_gpu(device) for device in devices]
    return gpu_descriptions[0] | ({"gpus": gpu_descriptions} if len(gpu_descriptions) > 1 else {})


def _describe_gpu(rank_device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(rank_device)
    gpu = NvmlGpu(rank_device)
    description: dict[str, Any] = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "allocator": torch.cuda.get_allocator_backend(),
        **gpu.read_description(),
    }
    return description | ({"nvml": gpu.read_errors} if gpu.read_errors else {})


def read_torch_settings(on_gpu: bool) -> dict[str, Any]:
    """Versions and switches of torch that change how fast and how exactly it computes, as they are now."""
    readers: dict[str, Callable[[], Any]] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "flash_attention": torch.backends.cuda.flash_sdp_enabled,
        "memory_efficient_attention": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math_attention": torch.backends.cuda.math_sdp_enabled,
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled,
    }
    if on_gpu:
        matmul = torch.backends.cuda.matmul
        readers |= {
            "cudnn": torch.backends.cudnn.version,
            "cublas": _find_cublas_version,
            "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
            "bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
            "fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
            "preferred_blas_library": lambda: str(torch.backends.cuda.preferred_blas_library()),
            "allocator_settings": lambda: torch.cuda.memory._snapshot()["allocator_settings"],
        }
    settings: dict[str, Any] = {}
    for name, read_value in readers.items():
        with contextlib.suppress(Exception):  # a fact that cannot be read is left out, never a reason to lose a run
            settings[name] = to_plain_value(read_value())
    return settings


def to_plain_value(value: Any) -> Any:
    """As a row can hold it."""
    if isinstance(value, Mapping):
        return {str(name): to_plain_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_value(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _find_cublas_version() -> str | None:
    """Of the package that torch's build brings."""
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if name.startswith("nvidia-cublas"):
            return package.version
    return None


@functools.cache
def query_gpu_topology() -> str | None:
    """How the GPUs of this machine are connected, as ``nvidia-smi topo -m`` prints it; None without GPUs."""
    if torch.version.cuda is None or shutil.which("nvidia-smi") is None:
        return None
    try:
        return subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
