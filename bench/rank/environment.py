"""What a run ran on: versions, device, power limit, clocks, topology, commit; whether a node is as fast as its kind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.core.installation import PACKAGE_FOLDER, read_torch_version
from bench.core.units import MIB
from bench.hardware import Hardware
from bench.hardware.detect import read_processor_name
from bench.rank.machine_load import NvmlGpu, format_ranges, list_usable_cpus

if TYPE_CHECKING:
    import torch

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
    *("HIP", "HSA_", "ROCBLAS_", "ROCR_", "MIOPEN_", "RCCL_"),
    *("NCCL_", "GLOO_", "UCC_", "UCX_", "FI_", "OFI_", "SHARP_", "NVSHMEM_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"),
    *("DS_", "DEEPSPEED_", "ACCELERATE_", "BNB_", "BITSANDBYTES_"),
)
"""Beginnings of the names of variables that can change a result: of torch and its compilers, of CUDA's and ROCm's
libraries, of communication, of a processor's libraries, of the frameworks."""

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
        "torch": read_torch_version()["__version__"],
        "cuda": read_torch_version()["cuda"],
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
    """Of NCCL, or of RCCL, which PyTorch calls by the same name; None where torch was not imported: it took no part."""
    if "torch" not in sys.modules:
        return None
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
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
    import torch

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
    import torch

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
    import torch

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
    if read_torch_version()["cuda"] is None or shutil.which("nvidia-smi") is None:
        return None
    try:
        return subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


# --- Is a node as fast as its kind? A few matrix products and an all-reduce, before a run is measured on it.

MIN_MATMUL_SHARE = 0.7
"""Of what large products reach while training (`hardware.speeds.matmul`): a node below it is not like the others."""

MIN_ALL_REDUCE_SHARE = 0.4
"""Of what large collectives reach (`hardware.speeds.links`), of which one of `ALL_REDUCE_BYTES_BY_DEVICE` reaches a
part."""

MATRIX_SIZE_BY_DEVICE = {"cuda": 8192, "cpu": 768}
ALL_REDUCE_BYTES_BY_DEVICE = {"cuda": 256 * MIB, "cpu": MIB}
TIMED_REPETITIONS = 10
WARMUP_REPETITIONS = 3


DeviceInfo = dict[str, Any]


@dataclass(frozen=True)
class NodeHealth:
    """What one rank found of its device and of the network of its run."""

    matmul_tflops: float
    matmul_expected_tflops: float | None
    """None where the hardware's description does not say."""
    all_reduce_gb_s: float | None
    """Bus bandwidth among all ranks in 10^9 bytes/s: ``2 (W - 1) / W`` times the bytes of a tensor by the time
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). None for one rank alone."""
    all_reduce_expected_gb_s: float | None

    def find_fault(self, host: str, num_nodes: int) -> NodeFault | None:
        """What is wrong, if something is: with the device of this host, or with the network between the hosts."""
        shortfall = _describe_shortfall(
            "matrix products", self.matmul_tflops, self.matmul_expected_tflops, "TFLOP/s", MIN_MATMUL_SHARE
        )
        if shortfall:
            return NodeFault(host, shortfall)
        shortfall = _describe_shortfall(
            "an all-reduce", self.all_reduce_gb_s, self.all_reduce_expected_gb_s, "GB/s", MIN_ALL_REDUCE_SHARE
        )
        return NodeFault(host if num_nodes == 1 else None, shortfall) if shortfall else None


@dataclass(frozen=True)
class NodeFault:
    """Why a run is not measured on the nodes it was given."""

    node: str | None
    """Its host; None for a network between several, of which nobody knows which is slow."""
    message: str

    def __str__(self) -> str:
        where = f"node {self.node}" if self.node else "the network between the run's nodes"
        return f"{where} failed the health check: {self.message}; cluster.check=none measures all the same"


class UnhealthyError(RuntimeError):
    """A node is much slower than its kind: nothing that is measured on it would stand for the others."""


def refuse_unhealthy_node(
    hardware: Hardware, device: torch.device, *, host: str, num_nodes: int, device_info: DeviceInfo
) -> None:
    """Check this rank's node, and note what was found.

    Parameters
    ----------
    host: str
        Name of the rank's node.
    num_nodes: int
        Machines that the ranks are spread over.
    device_info: dict
        Of the rank: what is found is added as ``health``, before anything is raised.

    Raises
    ------
    UnhealthyError
        Naming the node, what it reaches and what is expected of it.
    """
    health = measure_node_health(hardware, device, num_nodes=num_nodes)
    fault = health.find_fault(host, num_nodes)
    device_info["health"] = {**dataclasses.asdict(health), "node": host, "failed_node": fault.node if fault else None}
    if fault:
        raise UnhealthyError(str(fault))


def build_health_columns(device_infos: Iterable[DeviceInfo]) -> DeviceInfo:
    """What the checks of all ranks come to: the least of each number, and the nodes that failed."""
    rank_healths = [device_info["health"] for device_info in device_infos if "health" in device_info]
    minima = {
        f"health_{name}": min((health[name] for health in rank_healths if health[name] is not None), default=None)
        for name in ("matmul_tflops", "all_reduce_gb_s")
    }
    failed_nodes = sorted({health["failed_node"] for health in rank_healths if health["failed_node"]})
    return {**minima, "failed_nodes": ",".join(failed_nodes) or None}


def measure_node_health(hardware: Hardware, device: torch.device, *, num_nodes: int) -> NodeHealth:
    """Time products on a device, and an all-reduce among all ranks, which call this together.

    Parameters
    ----------
    num_nodes: int
        Machines that the ranks are spread over.
    """
    import torch
    import torch.distributed as dist

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    dtype_name = (
        "bf16"
        if device.type == "cuda" and "bf16" in hardware.peak_tflops
        else "fp16"
        if device.type == "cuda"
        else "fp32"
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype_name]
    matrix_size = MATRIX_SIZE_BY_DEVICE[device.type]
    matrix = torch.full((matrix_size, matrix_size), 1 / matrix_size, dtype=dtype, device=device)
    tflops = 2 * matrix_size**3 / _measure_seconds(functools.partial(torch.mm, matrix, matrix), device) / 1e12
    del matrix
    bandwidth_gb_s = None
    if world_size > 1:
        tensor = torch.zeros(ALL_REDUCE_BYTES_BY_DEVICE[device.type] // dtype.itemsize, dtype=dtype, device=device)
        all_reduce_s = _measure_seconds(functools.partial(dist.all_reduce, tensor), device)
        bandwidth_gb_s = 2 * (world_size - 1) / world_size * tensor.nbytes / all_reduce_s / 1e9
        del tensor
    if device.type == "cuda":  # what is measured afterwards finds the memory as if nothing had been there
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return NodeHealth(
        tflops,
        compute_expected_tflops(hardware, dtype_name),
        bandwidth_gb_s,
        compute_expected_gb_s(hardware, world_size, num_nodes),
    )


def compute_expected_tflops(hardware: Hardware, dtype_name: str) -> float | None:
    """What large products reach on such a device while training."""
    peak, speeds = hardware.peak_tflops.get(dtype_name), hardware.speeds
    if peak is None or speeds is None or speeds.matmul is None:
        return None
    efficiency = speeds.matmul.compute_reached_share(dtype_name)
    return None if efficiency is None else peak * efficiency


def compute_expected_gb_s(hardware: Hardware, world_size: int, num_nodes: int) -> float | None:
    """What large collectives of NCCL reach among so many ranks: the least of the links that a ring takes.

    Fewer ranks in a node than it has adapters reach as many adapters as they are.
    """
    links = hardware.speeds.links if hardware.speeds else None
    if links is None or links.gloo is not None or world_size == 1:
        return None
    ranks_per_node = -(-world_size // num_nodes)
    intra_node_gb_s = links.compute_reached_gb_s(ranks_per_node)
    if num_nodes == 1:
        return intra_node_gb_s
    inter_node_gb_s = links.node_gb_s * links.node_efficiency * min(1.0, ranks_per_node / links.adapters)
    return inter_node_gb_s if ranks_per_node == 1 else min(intra_node_gb_s, inter_node_gb_s)


def _measure_seconds(call: Callable[[], object], device: torch.device) -> float:
    import torch

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARMUP_REPETITIONS):
        call()
    synchronize()
    started_at = time.perf_counter()
    for _ in range(TIMED_REPETITIONS):
        call()
    synchronize()
    return (time.perf_counter() - started_at) / TIMED_REPETITIONS


def _describe_shortfall(
    operation: str, measured: float | None, expected: float | None, unit: str, min_share: float
) -> str | None:
    if measured is None or expected is None or measured >= min_share * expected:
        return None
    return f"{operation} reach {measured:.4g} of {expected:.4g} {unit} expected (at least {min_share:.0%} is asked for)"
