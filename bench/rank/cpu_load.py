"""How busy the machine was while a rank was timed, and when that makes its time doubtful.

Of processors ``/proc/stat`` says what everybody together computed, in ticks of 10 ms. What a run's own ranks computed
is taken away from that: what is left is others' (the kernel's work for them, and what a hypervisor gave to other
virtual machines, included).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rank.cpu_threads import list_usable_cpus

PROC_STAT = Path("/proc/stat")

MIN_TIMED_WINDOW_S = 0.5
"""A shorter time is too few ticks: then what others computed is counted from the beginning of warm-up."""

MIN_WINDOW_S = 0.2
"""Over still less time nothing is said."""

MAX_OTHERS_CPU_SHARE = 0.10
"""Share of the time of the processors a rank may use above which others' work makes its step times doubtful."""


@dataclass(frozen=True)
class CpuCounters:
    """The processors' counters at one moment."""

    read_at_s: float
    busy_s: float
    """Of all processors this process may use, since they were started."""
    own_s: float
    """Processor time of this process and the children it waited for."""


@dataclass(frozen=True)
class CpuLoad:
    """What was computed on the processors of a rank, by whom, over a time."""

    window_s: float
    busy_s: float
    own_s: float
    cpus: tuple[int, ...]
    """Numbers of the processors the rank may use."""
    load_average: float
    """Of the machine over the last minute, at the end: processes that compute or wait for a processor or a disk."""


def read_cpu_counters(cpus: Iterable[int], stat_path: Path = PROC_STAT) -> CpuCounters | None:
    """The counters now; None where the system has none."""
    try:
        lines = stat_path.read_text().splitlines()
    except OSError:
        return None
    cpu_names = {f"cpu{cpu}" for cpu in cpus}
    busy_ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name in cpu_names:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (int(field) for field in fields)
            busy_ticks += user + nice + system + irq + softirq + steal
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return CpuCounters(time.perf_counter(), busy_ticks / os.sysconf("SC_CLK_TCK"), own_s)


class CpuLoadProbe:
    """Reads the counters around a rank's steps."""

    def __init__(self) -> None:
        self._cpus = tuple(list_usable_cpus())
        self._before_warmup = read_cpu_counters(self._cpus)
        self._before_steps: CpuCounters | None = None

    def start_timed_steps(self) -> None:
        """Right before the timed steps."""
        self._before_steps = read_cpu_counters(self._cpus)

    def stop(self) -> CpuLoad | None:
        """Right after the timed steps; None where the system says nothing."""
        end, start = read_cpu_counters(self._cpus), self._before_steps
        if end is None or start is None or self._before_warmup is None:
            return None
        if end.read_at_s - start.read_at_s < MIN_TIMED_WINDOW_S:
            start = self._before_warmup
        return CpuLoad(
            end.read_at_s - start.read_at_s,
            end.busy_s - start.busy_s,
            end.own_s - start.own_s,
            self._cpus,
            os.getloadavg()[0],
        )


def compute_others_cpu_share(loads_by_host: Mapping[str, Sequence[CpuLoad]]) -> float | None:
    """Share of the processors' time that processes outside the run used, of the machine where it was most.

    Parameters
    ----------
    loads_by_host: mapping
        Of the ranks, by host. Ranks that may use the same processors are counted together.

    Returns
    -------
    float or None
        0 to 1; None where no rank was watched for `MIN_WINDOW_S`.
    """
    shares = []
    for host_loads in loads_by_host.values():
        for cpus in {load.cpus for load in host_loads}:
            shared_loads = [load for load in host_loads if load.cpus == cpus and load.window_s >= MIN_WINDOW_S]
            if shared_loads:
                busy_cpus = sum(load.busy_s / load.window_s for load in shared_loads) / len(shared_loads)
                own_cpus = sum(load.own_s / load.window_s for load in shared_loads)
                shares.append(min(1.0, max(0.0, busy_cpus - own_cpus) / len(cpus)))
    return max(shares, default=None)


def find_cpu_degradations(share: float | None) -> list[str]:
    """Why others' work on the processors makes a time doubtful, if it does."""
    if share is None or share <= MAX_OTHERS_CPU_SHARE:
        return []
    return [f"other processes used {share:.0%} of the processors"]
