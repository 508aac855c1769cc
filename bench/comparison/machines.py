"""What rows say of the machine and the software they ran on, and where two sets of them differ. Pure functions.

A machine is what stays when software is upgraded: devices, their power limit and clocks, the driver, the network, the
processor. A different one explains any difference of times, so none is called a regression. Software is what an
upgrade changes, and what a comparison is there to judge.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.records import Record

LINK = re.compile(r"^(NV\d+|PIX|PXB|PHB|NODE|SYS)$")
"""How two devices of a machine are connected, in the words of ``nvidia-smi topo -m``."""

NETWORK_VARIABLES = ("NCCL_", "GLOO_")
SAYS_NOTHING = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "CUDA_VISIBLE_DEVICES")
"""Variables that change what is printed, or are different in every job."""


@dataclass(frozen=True)
class Fact:
    """One thing that rows say about where they ran."""

    name: str
    read: Callable[[Record], Any]
    memory: Callable[[Record], bool] = lambda record: False
    """Whether another value may change what memory a run takes, or has."""


@dataclass(frozen=True)
class Difference:
    """A fact in which base and candidate differ."""

    name: str
    base: str
    candidate: str
    memory: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.base} → {self.candidate}"


def _environment(record: Record) -> dict[str, Any]:
    return record.get("environment") or {}


def _of_devices(name: str, unit: str = "", scale: float = 1.0) -> Callable[[Record], str | None]:
    """Reads a fact of the ranks' devices; ranks that differ are all told."""

    def read(record: Record) -> str | None:
        devices = (_environment(record).get("devices") or {}).values()
        values = sorted({facts[name] for facts in devices if facts.get(name) is not None})
        told = [f"{value / scale:g}{unit}" if isinstance(value, int | float) else str(value) for value in values]
        return ", ".join(told) or None

    return read


def _device_name(record: Record) -> str | None:
    """Its name; a rank that ends early does not say, and nothing ran for a prediction."""
    return None if record.get("evidence") == "predicted" else record.get("gpu_name")


def _description(record: Record) -> str | None:
    """Predictions: the hardware they are made for, down to every number that is believed of it."""
    hardware = (record.get("config") or {}).get("hardware")
    if record.get("evidence") != "predicted" or not hardware:
        return None
    believed = json.dumps({name: value for name, value in hardware.items() if name != "sources"}, sort_keys=True)
    return f"{hardware.get('name')} ({hashlib.sha256(believed.encode()).hexdigest()[:6]})"


def _ranks_per_node(record: Record) -> str | None:
    world_size, nodes = record.get("world_size"), record.get("nodes")
    return (
        f"{world_size // nodes} on each of {nodes} nodes"
        if world_size and nodes and nodes > 1
        else (f"{world_size} on 1 node" if world_size else None)
    )


def _links(record: Record) -> str | None:
    """How often each kind of link occurs between devices of a node: columns of affinities differ between jobs."""
    topology = _environment(record).get("topology")
    if not topology:
        return None
    found = Counter(word for word in str(topology).partition("Legend")[0].split() if LINK.match(word))
    return ", ".join(f"{link} {count}×" for link, count in sorted(found.items())) or "none"


def _variables(network: bool) -> Callable[[Record], str | None]:
    def read(record: Record) -> str | None:
        variables = _environment(record).get("variables")
        if variables is None:
            return None
        told = [
            f"{name}={value}"
            for name, value in sorted(variables.items())
            if name.startswith(NETWORK_VARIABLES) == network and name not in SAYS_NOTHING
        ]
        return " ".join(told) or "none set"

    return read


def _from_environment(name: str) -> Callable[[Record], Any]:
    return lambda record: _environment(record).get(name)


def _package(name: str) -> Callable[[Record], Any]:
    return lambda record: (_environment(record).get("packages") or {}).get(name)


def _commit(record: Record) -> str | None:
    sha = record.get("git_sha")
    return None if sha is None else sha[:10] + ("" if record.get("git_clean") is not False else " with changes")


def _on_gpu(record: Record) -> bool:
    return record.get("device") != "cpu"


MACHINE = (
    Fact("device", _device_name, _on_gpu),
    Fact("hardware description", _description, lambda record: True),
    Fact("device memory", _of_devices("memory_bytes", " GiB", 2**30), lambda record: True),
    Fact("ranks", _ranks_per_node),
    Fact("power limit", _of_devices("power_limit_w", " W")),
    Fact("highest SM clock", _of_devices("sm_clock_max_mhz", " MHz")),
    Fact("driver", _of_devices("driver")),
    Fact("links inside a node", _links),
    Fact("network settings", _variables(network=True)),
    Fact("network backend", lambda record: (record.get("effective") or {}).get("backend")),
    Fact("processor cores", _from_environment("processor_cores")),
    Fact("threads per rank", _of_devices("threads")),
)
"""What makes times of two rows incomparable where it differs."""

SOFTWARE = (
    Fact("commit", _commit),
    Fact("predictor", lambda record: record.get("predictor")),
    Fact("torch", lambda record: record.get("torch_version")),
    Fact("CUDA", _from_environment("cuda")),
    Fact("NCCL", _from_environment("nccl")),
    *(
        Fact(name, _package(name))
        for name in ("transformers", "triton", "numpy", "hydra-core", "omegaconf", "submitit")
    ),
    Fact("Python", _from_environment("python")),
    Fact("kernel", _from_environment("kernel")),
    Fact("variables", _variables(network=False)),
)
"""What an upgrade changes: told, and judged by its effect."""


def differences(base: Sequence[Record], candidate: Sequence[Record], facts: Iterable[Fact]) -> list[Difference]:
    """Facts in which two sets of rows differ. What either side does not say counts as no difference."""
    found = []
    for fact in facts:
        sides = [
            sorted({str(value) for row in rows if (value := fact.read(row)) is not None}) for rows in (base, candidate)
        ]
        if sides[0] and sides[1] and sides[0] != sides[1]:
            memory = any(fact.memory(row) for row in (*base, *candidate))
            found.append(Difference(fact.name, " and ".join(sides[0]), " and ".join(sides[1]), memory))
    return found
