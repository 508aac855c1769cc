"""What a run ran on: versions, device, power limit and clocks, topology, commit."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from bench.hardware.detect import nvml_text, processor_name

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

RECORDED_VARIABLES = ("PYTORCH_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_VISIBLE_DEVICES", "CUBLAS_", "MALLOC_")


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
        "variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith(RECORDED_VARIABLES)},
    }


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


def device(rank_device: torch.device) -> dict[str, Any]:
    """The rank's device as it reports itself: name, power limit, clocks, driver."""
    if rank_device.type != "cuda":
        return {"name": processor_name(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(rank_device)
    facts: dict[str, Any] = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "allocator": torch.cuda.get_allocator_backend(),
    }
    return facts | _nvml_facts(rank_device)


def _nvml_facts(rank_device: torch.device) -> dict[str, Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(rank_device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return {
            "driver": nvml_text(pynvml.nvmlSystemGetDriverVersion()),
            "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        }
    except Exception as error:  # a fact that cannot be read is left out and said, never a reason to lose a run
        return {"nvml": f"not readable: {error}"}


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
