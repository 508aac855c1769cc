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

from bench.hardware import Hardware

LEAST_SHARE_OF_PRODUCTS = 0.7
"""Of what large products reach while training (`hardware.speeds.matmul`): a node below it is not like the others."""

LEAST_SHARE_OF_ALL_REDUCE = 0.4
"""Of what large collectives reach (`hardware.speeds.links`), of which one of `REDUCED_BYTES` reaches a part."""

MATRIX = {"cuda": 8192, "cpu": 768}
REDUCED_BYTES = {"cuda": 256 * 2**20, "cpu": 2**20}
REPETITIONS = 10
WARMUP = 3


Facts = dict[str, Any]


@dataclass(frozen=True)
class Health:
    """What one rank found of its device and of the network of its run."""

    matmul_tflops: float
    matmul_expected_tflops: float | None
    """None where the hardware's description does not say."""
    all_reduce_gb_s: float | None
    """Bus bandwidth among all ranks in 10^9 bytes/s: ``2 (W - 1) / W`` times the bytes of a tensor by the time
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). None for one rank alone."""
    all_reduce_expected_gb_s: float | None

    def fault(self, host: str, nodes: int) -> Fault | None:
        """What is wrong, if something is: with the device of this host, or with the network between the hosts."""
        slow = _shortfall(
            "matrix products", self.matmul_tflops, self.matmul_expected_tflops, "TFLOP/s", LEAST_SHARE_OF_PRODUCTS
        )
        if slow:
            return Fault(host, slow)
        slow = _shortfall(
            "an all-reduce", self.all_reduce_gb_s, self.all_reduce_expected_gb_s, "GB/s", LEAST_SHARE_OF_ALL_REDUCE
        )
        return Fault(host if nodes == 1 else None, slow) if slow else None


@dataclass(frozen=True)
class Fault:
    """Why a run is not measured on the nodes it was given."""

    node: str | None
    """Its host; None for a network between several, of which nobody knows which is slow."""
    words: str

    def __str__(self) -> str:
        where = f"node {self.node}" if self.node else "the network between the run's nodes"
        return f"{where} failed the health check: {self.words}; cluster.check=none measures all the same"


class UnhealthyError(RuntimeError):
    """A node is much slower than its kind: nothing that is measured on it would stand for the others."""


def refuse_unhealthy(hardware: Hardware, device: torch.device, *, host: str, nodes: int, facts: Facts) -> None:
    """Check this rank's node, and note what was found.

    Parameters
    ----------
    host: str
        Name of the rank's node.
    nodes: int
        Machines that the ranks are spread over.
    facts: dict
        Of the rank: what is found is added as ``health``, before anything is raised.

    Raises
    ------
    UnhealthyError
        Naming the node, what it reaches and what is expected of it.
    """
    health = check_health(hardware, device, nodes=nodes)
    fault = health.fault(host, nodes)
    facts["health"] = {**dataclasses.asdict(health), "node": host, "failed_node": fault.node if fault else None}
    if fault:
        raise UnhealthyError(str(fault))


def health_columns(checked: Iterable[Facts]) -> Facts:
    """What the checks of all ranks come to: the least of each number, and the nodes that failed."""
    found = [facts["health"] for facts in checked if "health" in facts]
    least = {
        f"health_{name}": min((health[name] for health in found if health[name] is not None), default=None)
        for name in ("matmul_tflops", "all_reduce_gb_s")
    }
    failed = sorted({health["failed_node"] for health in found if health["failed_node"]})
    return {**least, "failed_nodes": ",".join(failed) or None}


def check_health(hardware: Hardware, device: torch.device, *, nodes: int) -> Health:
    """Time products on a device, and an all-reduce among all ranks, which call this together.

    Parameters
    ----------
    nodes: int
        Machines that the ranks are spread over.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    kind = (
        "bf16"
        if device.type == "cuda" and "bf16" in hardware.peak_tflops
        else "fp16"
        if device.type == "cuda"
        else "fp32"
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
    size = MATRIX[device.type]
    matrix = torch.full((size, size), 1 / size, dtype=dtype, device=device)
    tflops = 2 * size**3 / _seconds(functools.partial(torch.mm, matrix, matrix), device) / 1e12
    del matrix
    bandwidth = None
    if world_size > 1:
        tensor = torch.zeros(REDUCED_BYTES[device.type] // dtype.itemsize, dtype=dtype, device=device)
        reduce_s = _seconds(functools.partial(dist.all_reduce, tensor), device)
        bandwidth = 2 * (world_size - 1) / world_size * tensor.nbytes / reduce_s / 1e9
        del tensor
    if device.type == "cuda":  # what is measured afterwards finds the memory as if nothing had been there
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return Health(tflops, expected_tflops(hardware, kind), bandwidth, expected_gb_s(hardware, world_size, nodes))


def expected_tflops(hardware: Hardware, kind: str) -> float | None:
    """What large products reach on such a device while training."""
    peak, speeds = hardware.peak_tflops.get(kind), hardware.speeds
    if peak is None or speeds is None or speeds.matmul is None:
        return None
    share = speeds.matmul.efficiency.get(kind)
    return None if share is None else peak * share


def expected_gb_s(hardware: Hardware, world_size: int, nodes: int) -> float | None:
    """What large collectives of NCCL reach among so many ranks: the least of the links that a ring takes.

    Fewer ranks in a node than it has adapters reach as many adapters as they are.
    """
    links = hardware.speeds.links if hardware.speeds else None
    if links is None or links.gloo is not None or world_size == 1:
        return None
    within = links.gpu_gb_s * links.gpu_efficiency
    if nodes == 1:
        return within
    ranks_per_node = -(-world_size // nodes)
    across = links.node_gb_s * links.node_efficiency * min(1.0, ranks_per_node / links.adapters)
    return across if ranks_per_node == 1 else min(within, across)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARMUP):
        call()
    wait()
    started = time.perf_counter()
    for _ in range(REPETITIONS):
        call()
    wait()
    return (time.perf_counter() - started) / REPETITIONS


def _shortfall(what: str, found: float | None, expected: float | None, unit: str, least: float) -> str | None:
    if found is None or expected is None or found >= least * expected:
        return None
    return f"{what} reach {found:.4g} of {expected:.4g} {unit} expected (at least {least:.0%} is asked for)"
