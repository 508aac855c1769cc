"""Is a node as fast as its kind? A few matrix products and an all-reduce, before a run is measured on it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.core.units import MIB
from bench.hardware import Hardware

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
    efficiency = speeds.matmul.efficiency.get(dtype_name)
    return None if efficiency is None else peak * efficiency


def compute_expected_gb_s(hardware: Hardware, world_size: int, num_nodes: int) -> float | None:
    """What large collectives of NCCL reach among so many ranks: the least of the links that a ring takes.

    Fewer ranks in a node than it has adapters reach as many adapters as they are.
    """
    links = hardware.speeds.links if hardware.speeds else None
    if links is None or links.gloo is not None or world_size == 1:
        return None
    intra_node_gb_s = links.gpu_gb_s * links.gpu_efficiency
    if num_nodes == 1:
        return intra_node_gb_s
    ranks_per_node = -(-world_size // num_nodes)
    inter_node_gb_s = links.node_gb_s * links.node_efficiency * min(1.0, ranks_per_node / links.adapters)
    return inter_node_gb_s if ranks_per_node == 1 else min(intra_node_gb_s, inter_node_gb_s)


def _measure_seconds(call: Callable[[], object], device: torch.device) -> float:
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
