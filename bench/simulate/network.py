"""How long a collective takes: bandwidth, latency, protocol and algorithm, within a node and across nodes.

NCCL chooses among algorithms and protocols by a model of its own (``src/graph/tuning.cc`` in
https://github.com/NVIDIA/nccl, read at 01afd20a77b5804e0ecf1042509dd9d20ebf9e93): latency of the steps plus bytes over
bandwidth, the fastest combination wins. This is that model, with the links' bandwidth from ``conf/hardware``.

Between processors collectives are gloo's: rings (``gloo/allgather.cc`` and ``gloo/allreduce.cc`` in
https://github.com/pytorch/gloo, read at 19f1d3ac8e3120faad559f474d0ceddec5d03ee7). PyTorch has it reduce and scatter by
an all-reduce of a copy, of which each rank keeps its part (``reduce_scatter_tensor_coalesced`` in its
``ProcessGroupGloo.cpp``).

Bus bandwidth is nccl-tests' (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): every rank of n
receives ``size * (n - 1) / n`` in an all-gather or a reduce-scatter of `size` bytes, twice that in an all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.errors import require_choice
from bench.hardware.speeds import Gloo, Links

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
"""Those that are calibrated."""
BROADCAST, REDUCE, GATHER, SCATTER = "broadcast", "reduce", "gather", "scatter"
"""From one rank to the others, or from them to it: the whole to (or of) each, or to each its part."""
FROM_ONE = (BROADCAST, REDUCE, GATHER, SCATTER)


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective."""

    ranks: int
    ranks_per_node: int
    """Of this group: 8 where it fills nodes of 8 GPUs, 1 where it has one rank on each node."""
    sharing: int = 1
    """Groups that use the same node's adapters at the same time: 8 where each GPU of a node is in another group."""

    @property
    def nodes(self) -> int:
        """Nodes the group is spread over."""
        return math.ceil(self.ranks / self.ranks_per_node)


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's ways to move data: tuning.cc's baseLat and hwLat (microseconds), and share of the bandwidth."""

    start_us: float
    gpu_step_us: float
    """One step of a ring over NVLink."""
    node_step_us: float
    """One step of a ring over the network."""
    bandwidth: float


RINGS = (
    Protocol(start_us=8.4, gpu_step_us=3.4, node_step_us=9.6, bandwidth=1.0),  # Simple
    Protocol(start_us=10.0, gpu_step_us=1.9, node_step_us=4.0, bandwidth=0.92),  # LL128: 120 of 128 bytes are data
    Protocol(start_us=3.6, gpu_step_us=0.85, node_step_us=2.7, bandwidth=0.25),  # LL: half flags, and then slower
)
TREES = (
    Protocol(start_us=0.0, gpu_step_us=28.0, node_step_us=50.0, bandwidth=0.9),
    Protocol(start_us=4.4, gpu_step_us=1.2, node_step_us=8.5, bandwidth=0.82),
    Protocol(start_us=4.4, gpu_step_us=0.94, node_step_us=5.0, bandwidth=0.24),
)
"""Trees carry all-reduces only: up and down, across as many levels as the nodes have doublings."""


def collective_seconds(kind: str, size_bytes: float, group: Group, links: Links) -> float:
    """Seconds of one collective that nothing else delays; 0 for a group of one rank.

    Parameters
    ----------
    kind: str
        ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``broadcast``, ``reduce``, ``gather`` or ``scatter``.
        The last two are copies over the one rank's link, which carries all parts but its own.
    size_bytes: float
        The whole: what every rank has after an all-gather, or before a reduce-scatter.
    """
    require_choice("collective", kind, (*COLLECTIVES, *FROM_ONE))
    if group.ranks == 1:
        return 0.0
    if links.gloo is not None:
        require_choice("collective of gloo", kind, (*COLLECTIVES, BROADCAST))
        return _gloo_seconds(kind, size_bytes, group, links, links.gloo)
    passes = 2 if kind == ALL_REDUCE else 1
    inner, outer = group.ranks - group.nodes, group.nodes - 1
    share = 1.0 if kind in (BROADCAST, REDUCE) else (group.ranks - 1) / group.ranks
    received = passes * size_bytes * share
    seconds_per_byte = _seconds_per_byte(group, links)
    start_s = 1e-6 * (1.0 if group.nodes > 1 else links.gpu_latency)
    step_s = 1e-6 * (links.latency if group.nodes > 1 else links.gpu_latency)
    times = [
        ring.start_us * start_s
        + passes * (inner * ring.gpu_step_us + outer * ring.node_step_us) * step_s
        + received * seconds_per_byte / ring.bandwidth
        for ring in RINGS
    ]
    if kind == ALL_REDUCE:
        inner_depth, depth = min(group.ranks, group.ranks_per_node) - 1, math.ceil(math.log2(group.nodes))
        times += [
            tree.start_us * start_s
            + 2 * (inner_depth * tree.gpu_step_us + depth * tree.node_step_us) * start_s
            + 2 * size_bytes * seconds_per_byte / tree.bandwidth
            for tree in TREES
        ]
    return min(times)


def bus_gb_s(kind: str, size_bytes: float, group: Group, links: Links) -> float:
    """The bus bandwidth nccl-tests would print, in 10^9 bytes per second."""
    passes = 2 if kind == ALL_REDUCE else 1
    received = passes * size_bytes * (group.ranks - 1) / group.ranks
    return received / collective_seconds(kind, size_bytes, group, links) / 1e9


def _gloo_seconds(kind: str, size_bytes: float, group: Group, links: Links, gloo: Gloo) -> float:
    """One ring, whose steps are as long as the longest of them; to reduce is to pass twice round it.

    A broadcast goes down a binomial tree instead, the whole at every level (``gloo/broadcast.cc``).
    """
    if kind == BROADCAST:
        levels = math.ceil(math.log2(group.ranks))
        step_s = gloo.step_us * 1e-6 * (links.latency if group.nodes > 1 else 1.0)
        return levels * (step_s + size_bytes * _seconds_per_byte(group, links))
    steps = (1 if kind == ALL_GATHER else 2) * (group.ranks - 1)
    passes = 2 if kind == ALL_REDUCE else 1
    received = passes * size_bytes * (group.ranks - 1) / group.ranks
    share = {ALL_GATHER: 1.0, REDUCE_SCATTER: gloo.reduce_scatter, ALL_REDUCE: gloo.reduce}[kind]
    step_s = gloo.step_us * 1e-6 * (links.latency if group.nodes > 1 else 1.0)
    return steps * step_s + received * share * _seconds_per_byte(group, links)


def _seconds_per_byte(group: Group, links: Links) -> float:
    """Of what each rank receives, on the narrowest link of the ring.

    All rings together carry what one rank receives into each node, so a node's adapters serve the group as one link;
    a group with fewer ranks in a node than the node has adapters reaches as many as it has ranks.
    """
    inside = 1 / (links.gpu_gb_s * links.gpu_efficiency * 1e9)
    if group.nodes == 1:
        return inside
    share = min(1.0, min(group.ranks, group.ranks_per_node) / links.adapters, 1 / group.sharing)
    across = 1 / (links.node_gb_s * links.node_efficiency * share * 1e9)
    across *= 1 + links.congestion * math.log2(group.nodes / 2)
    return max(inside, across) if group.ranks_per_node > 1 else across
