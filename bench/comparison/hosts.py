"""What rows say of the machine and the software they ran on, and where two sets of them differ. Pure functions.

A machine is what stays when software is upgraded: devices, their power limit and clocks, the driver, the network, the
processor. A different one explains any difference of times, so none is called a regression. Software is what an
upgrade changes, and what a comparison is there to judge.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from bench.comparison.statistics import correct_p_values
from bench.core.units import GIB
from bench.records import Record
from bench.records.matching import build_step_time_key, encode_config_key

LINK_PATTERN = re.compile(r"^(NV\d+|PIX|PXB|PHB|NODE|SYS)$")
"""How two devices of a machine are connected, in the words of ``nvidia-smi topo -m``."""

NETWORK_VARIABLE_PREFIXES = ("NCCL_", "GLOO_")
IGNORED_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "CUDA_VISIBLE_DEVICES")
"""Variables that change what is printed, or are different in every job."""


@dataclass(frozen=True)
class EnvironmentFact:
    """One thing that rows say about where they ran."""

    name: str
    read_value: Callable[[Record], Any]
    affects_memory: Callable[[Record], bool] = lambda record: False
    """Whether another value may change what memory a run takes, or has."""


@dataclass(frozen=True)
class EnvironmentDifference:
    """A fact in which base and candidate differ."""

    name: str
    base: str
    candidate: str
    memory: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.base} → {self.candidate}"


def _get_environment(record: Record) -> dict[str, Any]:
    return record.get("environment") or {}


def _build_device_reader(name: str, unit: str = "", scale: float = 1.0) -> Callable[[Record], str | None]:
    """Reads a fact of the ranks' devices; ranks that differ are all told."""

    def read_devices(record: Record) -> str | None:
        devices = (_get_environment(record).get("devices") or {}).values()
        values = sorted({device_facts[name] for device_facts in devices if device_facts.get(name) is not None})
        value_texts = [f"{value / scale:g}{unit}" if isinstance(value, int | float) else str(value) for value in values]
        return ", ".join(value_texts) or None

    return read_devices


def _get_device_name(record: Record) -> str | None:
    """Its name; a rank that ends early does not say, and nothing ran for a prediction."""
    return None if record.get("evidence") == "predicted" else record.get("gpu_name")


def _describe_hardware(record: Record) -> str | None:
    """Predictions: the hardware they are made for, down to every number that is believed of it."""
    hardware = (record.get("config") or {}).get("hardware")
    if record.get("evidence") != "predicted" or not hardware:
        return None
    believed_values = json.dumps({name: value for name, value in hardware.items() if name != "sources"}, sort_keys=True)
    return f"{hardware.get('name')} ({hashlib.sha256(believed_values.encode()).hexdigest()[:6]})"


def _describe_ranks_per_node(record: Record) -> str | None:
    world_size, nodes = record.get("world_size"), record.get("nodes")
    return (
        f"{world_size // nodes} on each of {nodes} nodes"
        if world_size and nodes and nodes > 1
        else (f"{world_size} on 1 node" if world_size else None)
    )


def _count_links(record: Record) -> str | None:
    """How often each kind of link occurs between devices of a node: columns of affinities differ between jobs."""
    topology = _get_environment(record).get("topology")
    if not topology:
        return None
    link_counts = Counter(word for word in str(topology).partition("Legend")[0].split() if LINK_PATTERN.match(word))
    return ", ".join(f"{link} {count}×" for link, count in sorted(link_counts.items())) or "none"


def _build_variable_reader(is_network: bool) -> Callable[[Record], str | None]:
    def read_variables(record: Record) -> str | None:
        variables = _get_environment(record).get("variables")
        if variables is None:
            return None
        assignments = [
            f"{name}={value}"
            for name, value in sorted(variables.items())
            if name.startswith(NETWORK_VARIABLE_PREFIXES) == is_network and name not in IGNORED_VARIABLES
        ]
        return " ".join(assignments) or "none set"

    return read_variables


def _build_environment_reader(name: str) -> Callable[[Record], Any]:
    return lambda record: _get_environment(record).get(name)


def _build_package_reader(name: str) -> Callable[[Record], Any]:
    return lambda record: (_get_environment(record).get("packages") or {}).get(name)


def _format_commit(record: Record) -> str | None:
    sha = record.get("git_sha")
    return None if sha is None else sha[:10] + ("" if record.get("git_clean") is not False else " with changes")


def _is_on_gpu(record: Record) -> bool:
    return record.get("device") != "cpu"


MACHINE_FACTS = (
    EnvironmentFact("device", _get_device_name, _is_on_gpu),
    EnvironmentFact("hardware description", _describe_hardware, lambda record: True),
    EnvironmentFact("device memory", _build_device_reader("memory_bytes", " GiB", GIB), lambda record: True),
    EnvironmentFact("ranks", _describe_ranks_per_node),
    EnvironmentFact("power limit", _build_device_reader("power_limit_w", " W")),
    EnvironmentFact("highest SM clock", _build_device_reader("sm_clock_max_mhz", " MHz")),
    EnvironmentFact("driver", _build_device_reader("driver")),
    EnvironmentFact("links inside a node", _count_links),
    EnvironmentFact("network settings", _build_variable_reader(is_network=True)),
    EnvironmentFact("network backend", lambda record: (record.get("effective") or {}).get("backend")),
    EnvironmentFact("processor cores", _build_environment_reader("processor_cores")),
    EnvironmentFact("threads per rank", _build_device_reader("threads")),
)
"""What makes times of two rows incomparable where it differs."""

SOFTWARE_FACTS = (
    EnvironmentFact("commit", _format_commit),
    EnvironmentFact("predictor", lambda record: record.get("predictor")),
    EnvironmentFact("torch", lambda record: record.get("torch_version")),
    EnvironmentFact("CUDA", _build_environment_reader("cuda")),
    EnvironmentFact("NCCL", _build_environment_reader("nccl")),
    *(
        EnvironmentFact(name, _build_package_reader(name))
        for name in ("transformers", "triton", "numpy", "hydra-core", "omegaconf", "submitit")
    ),
    EnvironmentFact("Python", _build_environment_reader("python")),
    EnvironmentFact("kernel", _build_environment_reader("kernel")),
    EnvironmentFact("variables", _build_variable_reader(is_network=False)),
)
"""What an upgrade changes: told, and judged by its effect."""


def find_differences(
    base: Sequence[Record], candidate: Sequence[Record], facts: Iterable[EnvironmentFact]
) -> list[EnvironmentDifference]:
    """Facts in which two sets of rows differ. What either side does not say counts as no difference."""
    differences = []
    for fact in facts:
        sides = [
            sorted({str(value) for row in rows if (value := fact.read_value(row)) is not None})
            for rows in (base, candidate)
        ]
        if sides[0] and sides[1] and sides[0] != sides[1]:
            affects_memory = any(fact.affects_memory(row) for row in (*base, *candidate))
            differences.append(
                EnvironmentDifference(fact.name, " and ".join(sides[0]), " and ".join(sides[1]), affects_memory)
            )
    return differences


# --- Which hosts are slow: the rows of a store compared, host by host. Pure statistics on rows.

MIN_SAMPLES = 5
"""Of a host and of the others, below which nothing is said of it."""

MIN_HOSTS = 3
"""With two there is no telling which of them is not like the others."""

MIN_SLOWDOWN = 0.02
"""A host is called slow from so much on: as a share of the time, or of the speed."""

SIGNIFICANCE_LEVEL = 0.01
"""Of significance, after Holm's correction for all hosts that are compared."""


@dataclass(frozen=True)
class HostComparison:
    """How one host compares with the others in one respect."""

    host: str
    num_samples: int
    num_other_samples: int
    slowdown: float | None = None
    """Its median time against the others', as a share; None where there are too few samples."""
    p_value: float | None = None
    """Of a one-sided Mann-Whitney test that it is slower, corrected for the number of hosts."""

    @property
    def is_slow(self) -> bool:
        """Whether it is slower by more than chance, and by enough to matter."""
        if self.slowdown is None or self.p_value is None:
            return False
        return self.slowdown >= MIN_SLOWDOWN and self.p_value <= SIGNIFICANCE_LEVEL


def compare_step_times(rows: Iterable[Record]) -> list[HostComparison]:
    """Hosts by the step times of the runs they took part in.

    Each run's median step time is divided by the median of all runs of the same configuration, versions and kind of
    device; a configuration that ran once says nothing. A run of several hosts counts for each of them.
    """
    runs_by_question: dict[str, list[tuple[list[str], float]]] = defaultdict(list)
    for row in rows:
        question = build_step_time_key(row)
        time_s = _parse_positive(row.get("step_time_median_s"))
        if question is None or row.get("status") != "ok" or row.get("evidence") != "measured" or time_s is None:
            continue
        platform = (row.get("gpu_name"), row.get("torch_version"), row.get("gpus_per_node"))
        runs_by_question[f"{encode_config_key(question)} {platform}"].append((_list_hosts(row), time_s))
    samples: list[tuple[list[str], float]] = []
    for runs in runs_by_question.values():
        median_s = statistics.median(time_s for _, time_s in runs)
        if len(runs) > 1:
            samples += [(hosts, time_s / median_s) for hosts, time_s in runs]
    return _compare_hosts(samples)


def compare_matmul_times(rows: Iterable[Record]) -> list[HostComparison]:
    """Hosts by how long matrix products took in their health checks, against hosts with the same kind of device."""
    times_by_device: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for row in rows:
        for rank in _list_ranks(row):
            health = rank.get("health")
            matmul_tflops = _parse_positive(health.get("matmul_tflops")) if isinstance(health, dict) else None
            if matmul_tflops is not None and rank.get("host"):
                run_key = (str(rank["host"]), f"{row.get('run_id')} {row.get('attempt')}")
                run_times = times_by_device[f"{row.get('gpu_name')} {row.get('precision')}"]
                run_times[run_key] = max(run_times.get(run_key, 0.0), 1 / matmul_tflops)  # of a host its slowest device
    samples: list[tuple[list[str], float]] = []
    for run_times in times_by_device.values():
        median_time = statistics.median(run_times.values())
        samples += [([host], time_s / median_time) for (host, _), time_s in run_times.items()]
    return _compare_hosts(samples)


def _parse_positive(value: object) -> float | None:
    """A time or a speed; None for what is none, as damaged rows have it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None


def _list_ranks(row: Record) -> list[dict[str, Any]]:
    ranks = row.get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def _list_hosts(row: Record) -> list[str]:
    host_names = [str(rank["host"]) for rank in _list_ranks(row) if rank.get("host")]
    return sorted(set(host_names or str(row.get("hosts") or "").split(",")) - {""})


def _compare_hosts(samples: Sequence[tuple[list[str], float]]) -> list[HostComparison]:
    """Every host against the samples in which it had no part."""
    values_by_host: Mapping[str, list[float]] = defaultdict(list)
    for hosts, value in samples:
        for host in hosts:
            values_by_host[host].append(value)
    comparisons = []
    for host in sorted(values_by_host):
        other_values = [value for hosts, value in samples if host not in hosts]
        has_enough_samples = (
            min(len(values_by_host[host]), len(other_values)) >= MIN_SAMPLES and len(values_by_host) >= MIN_HOSTS
        )
        if not has_enough_samples:
            comparisons.append(HostComparison(host, len(values_by_host[host]), len(other_values)))
            continue
        slowdown = statistics.median(values_by_host[host]) / statistics.median(other_values) - 1
        test_result = stats.mannwhitneyu(values_by_host[host], other_values, alternative="greater")
        comparisons.append(
            HostComparison(host, len(values_by_host[host]), len(other_values), slowdown, float(test_result.pvalue))
        )
    tested_comparisons = [comparison for comparison in comparisons if comparison.p_value is not None]
    corrected_p_values = dict(
        zip(
            (comparison.host for comparison in tested_comparisons),
            correct_p_values([comparison.p_value or 0.0 for comparison in tested_comparisons]),
            strict=True,
        )
    )
    return [
        HostComparison(
            comparison.host,
            comparison.num_samples,
            comparison.num_other_samples,
            comparison.slowdown,
            corrected_p_values.get(comparison.host),
        )
        for comparison in comparisons
    ]
