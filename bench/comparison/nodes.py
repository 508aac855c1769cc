"""Which hosts are slow: the rows of a store compared, host by host. Pure statistics on rows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from bench.comparison.statistics import holm
from bench.records import Record
from bench.records.matching import identity, time_question

LEAST_SAMPLES = 5
"""Of a host and of the others, below which nothing is said of it."""

LEAST_HOSTS = 3
"""With two there is no telling which of them is not like the others."""

SLOW_FROM = 0.02
"""A host is called slow from so much on: as a share of the time, or of the speed."""

LEVEL = 0.01
"""Of significance, after Holm's correction for all hosts that are compared."""


@dataclass(frozen=True)
class HostTimes:
    """How one host compares with the others in one respect."""

    host: str
    samples: int
    others: int
    slower: float | None = None
    """Its median time against the others', as a share; None where there are too few samples."""
    p_value: float | None = None
    """Of a one-sided Mann-Whitney test that it is slower, corrected for the number of hosts."""

    @property
    def slow(self) -> bool:
        """Whether it is slower by more than chance, and by enough to matter."""
        if self.slower is None or self.p_value is None:
            return False
        return self.slower >= SLOW_FROM and self.p_value <= LEVEL


def compare_step_times(rows: Iterable[Record]) -> list[HostTimes]:
    """Hosts by the step times of the runs they took part in.

    Each run's median step time is divided by the median of all runs of the same configuration, versions and kind of
    device; a configuration that ran once says nothing. A run of several hosts counts for each of them.
    """
    groups: dict[str, list[tuple[list[str], float]]] = defaultdict(list)
    for row in rows:
        question = time_question(row)
        time_s = _positive(row.get("step_time_median_s"))
        if question is None or row.get("status") != "ok" or row.get("evidence") != "measured" or time_s is None:
            continue
        alike = (row.get("gpu_name"), row.get("torch_version"), row.get("gpus_per_node"))
        groups[f"{identity(question)} {alike}"].append((_hosts(row), time_s))
    samples: list[tuple[list[str], float]] = []
    for runs in groups.values():
        middle = statistics.median(time_s for _, time_s in runs)
        if len(runs) > 1:
            samples += [(hosts, time_s / middle) for hosts, time_s in runs]
    return _compare(samples)


def compare_products(rows: Iterable[Record]) -> list[HostTimes]:
    """Hosts by how long matrix products took in their health checks, against hosts with the same kind of device."""
    groups: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for row in rows:
        for rank in _ranks(row):
            health = rank.get("health")
            speed = _positive(health.get("matmul_tflops")) if isinstance(health, dict) else None
            if speed is not None and rank.get("host"):
                run = (str(rank["host"]), f"{row.get('run_id')} {row.get('attempt')}")
                kind = groups[f"{row.get('gpu_name')} {row.get('precision')}"]
                kind[run] = max(kind.get(run, 0.0), 1 / speed)  # of a host its slowest device
    samples: list[tuple[list[str], float]] = []
    for kind in groups.values():
        middle = statistics.median(kind.values())
        samples += [([host], time_s / middle) for (host, _), time_s in kind.items()]
    return _compare(samples)


def _positive(value: object) -> float | None:
    """A time or a speed; None for what is none, as damaged rows have it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None


def _ranks(row: Record) -> list[dict[str, Any]]:
    ranks = row.get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def _hosts(row: Record) -> list[str]:
    named = [str(rank["host"]) for rank in _ranks(row) if rank.get("host")]
    return sorted(set(named or str(row.get("hosts") or "").split(",")) - {""})


def _compare(samples: Sequence[tuple[list[str], float]]) -> list[HostTimes]:
    """Every host against the samples in which it had no part."""
    own: Mapping[str, list[float]] = defaultdict(list)
    for hosts, value in samples:
        for host in hosts:
            own[host].append(value)
    found = []
    for host in sorted(own):
        others = [value for hosts, value in samples if host not in hosts]
        enough = min(len(own[host]), len(others)) >= LEAST_SAMPLES and len(own) >= LEAST_HOSTS
        if not enough:
            found.append(HostTimes(host, len(own[host]), len(others)))
            continue
        slower = statistics.median(own[host]) / statistics.median(others) - 1
        test = stats.mannwhitneyu(own[host], others, alternative="greater")
        found.append(HostTimes(host, len(own[host]), len(others), slower, float(test.pvalue)))
    tested = [times for times in found if times.p_value is not None]
    corrected = dict(
        zip((times.host for times in tested), holm([times.p_value or 0.0 for times in tested]), strict=True)
    )
    return [
        HostTimes(times.host, times.samples, times.others, times.slower, corrected.get(times.host)) for times in found
    ]
