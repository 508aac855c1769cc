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
from pathlib import Path
from typing import Any

import torch

from bench.hardware.detect import processor_name
from bench.measure.gpu import Gpu
from bench.measure.processors import processors, ranges

PACKAGES = (
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

CODE = ("bench", "conf", "pyproject.toml", "constraints.txt")
"""What of a checkout can change a result."""

COMMIT_FILE = "COMMIT.json"
"""In a copy of the code: the commit it was made from."""

RECORDED_VARIABLES = (
    *("PYTORCH_", "TORCH", "ATEN_", "TRITON_", "INDUCTOR_", "CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_TF32_OVERRIDE"),
    *("NCCL_", "GLOO_", "UCC_", "UCX_", "FI_", "OFI_", "SHARP_", "NVSHMEM_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"),
    *("DS_", "DEEPSPEED_", "ACCELERATE_", "BNB_", "BITSANDBYTES_"),
)
"""Beginnings of the names of variables that can change a result: of torch and its compilers, of CUDA's libraries, of
communication, of a processor's libraries, of the frameworks."""

PLACES = re.compile(r"(HOME|ROOT|_PATH|_DIR|_CACHE)$")
"""In the name of a variable that only says where something lies: it is not recorded."""

WITHOUT_EFFECT = re.compile(r"DEBUG|LOG|VERBOSE|VISIBLE_DEVICES|TORCHELASTIC|TIMEOUT")
"""In the name of a variable that is recorded, and changes no result."""

SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|SIGNATURE|(?<!^NCCL_IB_P)KEY", re.IGNORECASE)
"""In the name of a variable whose value is nobody's business. NCCL_IB_PKEY is the index of a partition of a network."""


@functools.cache
def software() -> dict[str, Any]:
    """Versions of what computes, and the variables that steer it."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "packages": versions,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "kernel": platform.release(),
        "processor_cores": os.cpu_count(),
        "variables": recorded_variables(os.environ),
    }


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change a result, without those whose name says that their value is a secret."""
    known = {name: value for name, value in sorted(environment.items()) if name.startswith(RECORDED_VARIABLES)}
    return {name: value for name, value in known.items() if not SECRET.search(name) and not PLACES.search(name)}


def changed_variables(recorded: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Variables that can change a result and differ between a row and here, as ``NAME=there (here: value)``."""
    now = recorded_variables(environment)
    names = sorted(name for name in {*recorded, *now} if not WITHOUT_EFFECT.search(name))
    there = {name: f"{name}={recorded[name]}" if name in recorded else f"{name} unset" for name in names}
    return [f"{there[name]} (here: {now.get(name, 'unset')})" for name in names if recorded.get(name) != now.get(name)]


def _nccl_version() -> str | None:
    if torch.version.cuda is None:
        return None
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return None


@functools.cache
def commit() -> dict[str, Any]:
    """Commit of the code that runs, and whether code and configuration are as in it; None outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    if (root / COMMIT_FILE).exists():
        facts: dict[str, Any] = json.loads((root / COMMIT_FILE).read_text())
        return facts

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    sha = git("rev-parse", "HEAD") if (root / ".git").exists() else None
    return {"git_sha": sha, "git_clean": git("status", "--porcelain", "--", *CODE) == "" if sha else None}


def host() -> str:
    """Name of this machine."""
    return socket.gethostname()


def node() -> str:
    """Name of this machine as the cluster calls it, which may be a part of its host name."""
    return os.environ.get("SLURMD_NODENAME") or host()


def device(devices: Sequence[torch.device]) -> dict[str, Any]:
    """A rank's device as it reports itself; of several the first, and all under ``gpus``.

    What NVML does not answer is under ``nvml``.
    """
    first = devices[0]
    if first.type != "cuda":
        return {"name": processor_name(), "threads": torch.get_num_threads(), "processors": ranges(processors())}
    facts = [_gpu(each) for each in devices]
    return facts[0] | ({"gpus": facts} if len(facts) > 1 else {})


def _gpu(rank_device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(rank_device)
    gpu = Gpu(rank_device)
    facts: dict[str, Any] = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "allocator": torch.cuda.get_allocator_backend(),
        **gpu.description(),
    }
    return facts | ({"nvml": gpu.unanswered} if gpu.unanswered else {})


def torch_settings(on_gpu: bool) -> dict[str, Any]:
    """Versions and switches of torch that change how fast and how exactly it computes, as they are now."""
    questions: dict[str, Callable[[], Any]] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "flash_attention": torch.backends.cuda.flash_sdp_enabled,
        "memory_efficient_attention": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math_attention": torch.backends.cuda.math_sdp_enabled,
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled,
    }
    if on_gpu:
        matmul = torch.backends.cuda.matmul
        questions |= {
            "cudnn": torch.backends.cudnn.version,
            "cublas": _cublas_version,
            "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
            "bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
            "fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
            "preferred_blas_library": lambda: str(torch.backends.cuda.preferred_blas_library()),
            "allocator_settings": lambda: torch.cuda.memory._snapshot()["allocator_settings"],
        }
    settings: dict[str, Any] = {}
    for name, ask in questions.items():
        with contextlib.suppress(Exception):  # a fact that cannot be read is left out, never a reason to lose a run
            settings[name] = plain(ask())
    return settings


def plain(value: Any) -> Any:
    """As a row can hold it."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _cublas_version() -> str | None:
    """Of the package that torch's build brings."""
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if name.startswith("nvidia-cublas"):
            return package.version
    return None


@functools.cache
def topology() -> str | None:
    """How the GPUs of this machine are connected, as ``nvidia-smi topo -m`` prints it; None without GPUs."""
    if torch.version.cuda is None or shutil.which("nvidia-smi") is None:
        return None
    try:
        return subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
