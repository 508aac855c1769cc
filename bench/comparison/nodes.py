"""Which hosts are slow: the rows of a store compared, host by host. Pure statistics on rows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from bench.comparison.statistics import correct_p_values
from bench.records import Record
from bench.records.matching import build_step_time_key, encode_config_key

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
