"""How many threads a rank computes with beside its GPU, and on which processors."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def limit_cpu_threads(store: dist.Store | None, rank: int, node_ranks: Sequence[int]) -> None:
    """Have this process compute with its share of the threads that torch would start for it alone.

    Optimizers of offloaded parameters run on them: each of 8 ranks of a machine with all its processors would be many
    times slower. Ranks that may use the same processors share them; ranks that were bound to their own do not.
    Whoever sets ``OMP_NUM_THREADS`` has decided.

    Parameters
    ----------
    store: Store or None
        In which the ranks of the run find each other; None for a rank that is alone.
    rank: int
        This one.
    node_ranks: sequence of int
        All ranks of its machine, which call this together.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    own_affinity = {"host": socket.gethostname(), "cpus": list_usable_cpus()}
    affinities = [own_affinity]
    if store is not None:
        store.set(f"processors/{rank}", json.dumps(own_affinity))
        affinities = [json.loads(store.get(f"processors/{node_rank}")) for node_rank in node_ranks]
    torch.set_num_threads(compute_thread_share(own_affinity, affinities, torch.get_num_threads()))


def compute_thread_share(own_affinity: dict[str, Any], affinities: Sequence[dict[str, Any]], threads: int) -> int:
    """Of `threads`, those of a rank: an equal part for each rank of its host that may use any of its processors."""
    sharing_ranks = [
        affinity
        for affinity in affinities
        if affinity["host"] == own_affinity["host"] and set(affinity["cpus"]) & set(own_affinity["cpus"])
    ]
    return max(1, threads // max(1, len(sharing_ranks)))


def list_usable_cpus() -> list[int]:
    """Numbers of the processors this process may use."""
    return sorted(os.sched_getaffinity(0))


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: ``0-3,8``."""
    number_ranges: list[list[int]] = []
    for number in numbers:
        if number_ranges and number == number_ranges[-1][-1] + 1:
            number_ranges[-1] = [number_ranges[-1][0], number]
        else:
            number_ranges.append([number])
    return ",".join("-".join(map(str, number_range)) for number_range in number_ranges)
