"""How many threads a rank computes with beside its GPU, and on which processors."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def share_processors(store: dist.Store | None, rank: int, node: Sequence[int]) -> None:
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
    node: sequence of int
        All ranks of its machine, which call this together.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    own = {"host": socket.gethostname(), "cpus": processors()}
    ranks = [own]
    if store is not None:
        store.set(f"processors/{rank}", json.dumps(own))
        ranks = [json.loads(store.get(f"processors/{other}")) for other in node]
    torch.set_num_threads(threads_of(own, ranks, torch.get_num_threads()))


def threads_of(own: dict[str, Any], ranks: Sequence[dict[str, Any]], threads: int) -> int:
    """Of `threads`, those of a rank: an equal part for each rank of its host that may use any of its processors."""
    sharing = [other for other in ranks if other["host"] == own["host"] and set(other["cpus"]) & set(own["cpus"])]
    return max(1, threads // max(1, len(sharing)))


def processors() -> list[int]:
    """Numbers of the processors this process may use."""
    return sorted(os.sched_getaffinity(0))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: ``0-3,8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
