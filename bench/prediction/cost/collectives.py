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

import dataclasses
import math
from dataclasses import dataclass

from bench.core.errors import require_choice
from bench.hardware.speeds import GlooSpeed, LinkSpeeds

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
CALIBRATED_COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
"""Those that are calibrated."""
BROADCAST, REDUCE, GATHER, SCATTER = "broadcast", "reduce", "gather", "scatter"
"""From one rank to the others, or from them to it: the whole to (or of) each, or to each its part."""
ROOTED_COLLECTIVES = (BROADCAST, REDUCE, GATHER, SCATTER)
ALL_TO_ALL = "all-to-all"
"""A part from each rank to each other one: NCCL's and gloo's go directly, not round a ring."""


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks that take part in a collective."""

    num_ranks: int
    ranks_per_node: int
    """Of this group: 8 where it fills nodes of 8 GPUs, 1 where it has one rank on each node."""
    concurrent_groups: int = 1
    """Groups that use the same node's adapters at the same time: 8 where each GPU of a node is in another group."""
    merged_share: float | None = None
    """Of what an all-to-all has for other nodes, the share that crosses, where the same goes to a node once and is
    passed on within it; None where each part goes straight to its rank."""

    @property
    def nodes(self) -> int:
        """Nodes the group is spread over."""
        return math.ceil(self.num_ranks / self.ranks_per_node)


@dataclass(frozen=True)
class NcclProtocol:
    """One of NCCL's ways to move data: tuning.cc's baseLat and hwLat (microseconds), and share of the bandwidth."""

    base_latency_us: float
    nvlink_step_us: float
    """One step of a ring over NVLink."""
    network_step_us: float
    """One step of a ring over the network."""
    bandwidth_share: float


RING_PROTOCOLS = (
    NcclProtocol(base_latency_us=8.4, nvlink_step_us=3.4, network_step_us=9.6, bandwidth_share=1.0),  # Simple
    NcclProtocol(
        base_latency_us=10.0, nvlink_step_us=1.9, network_step_us=4.0, bandwidth_share=0.92
    ),  # LL128: 120 of 128 bytes are data
    NcclProtocol(
        base_latency_us=3.6, nvlink_step_us=0.85, network_step_us=2.7, bandwidth_share=0.25
    ),  # LL: half flags, and then slower
)
TREE_PROTOCOLS = (
    NcclProtocol(base_latency_us=0.0, nvlink_step_us=28.0, network_step_us=50.0, bandwidth_share=0.9),
    NcclProtocol(base_latency_us=4.4, nvlink_step_us=1.2, network_step_us=8.5, bandwidth_share=0.82),
    NcclProtocol(base_latency_us=4.4, nvlink_step_us=0.94, network_step_us=5.0, bandwidth_share=0.24),
)
"""Trees carry all-reduces only: up and down, across as many levels as the nodes have doublings."""


def compute_collective_seconds(kind: str, size_bytes: float, group: CollectiveGroup, links: LinkSpeeds) -> float:
    """Seconds of one collective that nothing else delays; 0 for a group of one rank.

    Parameters
    ----------
    kind: str
        ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all``, ``broadcast``, ``reduce``, ``gather`` or
        ``scatter``. The last two are copies over the one rank's link, which carries all parts but its own.
    size_bytes: float
        The whole: what every rank has after an all-gather, or before a reduce-scatter; of an all-to-all, what each rank
        has for all of them.
    """
    require_choice("collective", kind, (*CALIBRATED_COLLECTIVES, *ROOTED_COLLECTIVES, ALL_TO_ALL))
    if group.num_ranks == 1:
        return 0.0
    if kind == ALL_TO_ALL:
        return _compute_all_to_all_seconds(size_bytes, group, links)
    if links.gloo is not None:
        require_choice("collective of gloo", kind, (*CALIBRATED_COLLECTIVES, BROADCAST))
        return _compute_gloo_seconds(kind, size_bytes, group, links, links.gloo)
    passes = 2 if kind == ALL_REDUCE else 1
    nvlink_steps, network_steps = group.num_ranks - group.nodes, group.nodes - 1
    received_share = 1.0 if kind in (BROADCAST, REDUCE) else (group.num_ranks - 1) / group.num_ranks
    received_bytes = passes * size_bytes * received_share
    is_in_node = group.nodes == 1
    all_reduce_gain = links.gpu_all_reduce if kind == ALL_REDUCE else 1.0
    seconds_per_byte = _compute_seconds_per_byte(group, links) / (all_reduce_gain if is_in_node else 1.0)
    base_scale_s = 1e-6 * (links.gpu_latency if is_in_node else 1.0)
    step_scale_s = 1e-6 * (links.gpu_latency if is_in_node else links.latency)
    protocol_seconds = [
        protocol.base_latency_us * base_scale_s
        + passes * (nvlink_steps * protocol.nvlink_step_us + network_steps * protocol.network_step_us) * step_scale_s
        + received_bytes * seconds_per_byte / protocol.bandwidth_share
        for protocol in RING_PROTOCOLS
    ]
    if kind == ALL_REDUCE:
        nvlink_depth, network_depth = min(group.num_ranks, group.ranks_per_node) - 1, math.ceil(math.log2(group.nodes))
        tree_seconds_per_byte = 2 * _compute_node_seconds_per_byte(group, links) / all_reduce_gain
        if not is_in_node:
            # Of two trees, each for half of the data, every node is an inner one in one and a leaf in the other: it
            # sends everything twice, and once where there are but two nodes.
            times_sent = 1 if group.nodes == 2 else 2
            tree_seconds_per_byte = max(
                tree_seconds_per_byte, times_sent * _compute_network_seconds_per_byte(group, links)
            )
        protocol_seconds += [
            protocol.base_latency_us * base_scale_s
            + 2 * (nvlink_depth * protocol.nvlink_step_us + network_depth * protocol.network_step_us) * base_scale_s
            + size_bytes * tree_seconds_per_byte / protocol.bandwidth_share
            for protocol in TREE_PROTOCOLS
        ]
    return min(protocol_seconds)


def compute_send_seconds(size_bytes: float, links: LinkSpeeds, *, is_in_node: bool, concurrent_sends: int = 1) -> float:
    """Seconds of a tensor's way from one rank to another: what a broadcast among two takes.

    Parameters
    ----------
    concurrent_sends: int
        Ranks of a node that send to another one at the same time.
    """
    if is_in_node:
        return compute_collective_seconds(BROADCAST, size_bytes, CollectiveGroup(2, 2), links)
    if links.send_efficiency is not None:
        links = dataclasses.replace(links, node_efficiency=links.send_efficiency)
    return compute_collective_seconds(BROADCAST, size_bytes, CollectiveGroup(2, 1, concurrent_sends), links)


def _compute_all_to_all_seconds(size_bytes: float, group: CollectiveGroup, links: LinkSpeeds) -> float:
    """Every rank sends a part to each other one, all at once, and receives as much: ``size * (n - 1) / n`` bytes.

    Parts for ranks of the same node go over the link to them, those for other nodes over the node's adapters, which all
    its ranks of this group, and of concurrent ones, share. The slower of the two decides. Where the same goes to a node
    once (`CollectiveGroup.merged_share`), all parts that come from other nodes go over the links within one, too.
    Latency is assumed to be that of one step, and of one more for every doubling of the nodes; gloo takes a step for
    each other rank. Bandwidths are those of the rings; no all-to-all was measured.
    """
    num_ranks, ranks_per_node = group.num_ranks, min(group.num_ranks, group.ranks_per_node)
    inside_bytes = size_bytes * (ranks_per_node - 1) / num_ranks
    crossing_bytes = size_bytes * (num_ranks - ranks_per_node) / num_ranks
    if group.merged_share is not None:
        inside_bytes = size_bytes * (ranks_per_node - 1) / ranks_per_node
        crossing_bytes *= group.merged_share
    inside_s = inside_bytes * _compute_node_seconds_per_byte(group, links)
    crossing_s = 0.0
    if group.nodes > 1:
        crossing_s = crossing_bytes * ranks_per_node * _compute_network_seconds_per_byte(group, links)
    if links.gloo is not None:
        step_s = links.gloo.step_us * 1e-6 * (links.latency if group.nodes > 1 else 1.0)
        return (num_ranks - 1) * step_s + max(inside_s, crossing_s)
    protocol = RING_PROTOCOLS[0]
    if group.nodes == 1:
        return (protocol.base_latency_us + protocol.nvlink_step_us) * 1e-6 * links.gpu_latency + inside_s
    doublings = math.ceil(math.log2(group.nodes))
    latency_us = protocol.base_latency_us + (1 + doublings) * protocol.network_step_us * links.latency
    return latency_us * 1e-6 + max(inside_s, crossing_s)


def compute_bus_bandwidth(kind: str, size_bytes: float, group: CollectiveGroup, links: LinkSpeeds) -> float:
    """The bus bandwidth nccl-tests would print, in 10^9 bytes per second."""
    passes = 2 if kind == ALL_REDUCE else 1
    received_bytes = passes * size_bytes * (group.num_ranks - 1) / group.num_ranks
    return received_bytes / compute_collective_seconds(kind, size_bytes, group, links) / 1e9


def _compute_gloo_seconds(
    kind: str, size_bytes: float, group: CollectiveGroup, links: LinkSpeeds, gloo: GlooSpeed
) -> float:
    """One ring, whose steps are as long as the longest of them; to reduce is to pass twice round it.

    A broadcast goes down a binomial tree instead, the whole at every level (``gloo/broadcast.cc``).
    """
    if kind == BROADCAST:
        levels = math.ceil(math.log2(group.num_ranks))
        step_s = gloo.step_us * 1e-6 * (links.latency if group.nodes > 1 else 1.0)
        return levels * (step_s + size_bytes * _compute_seconds_per_byte(group, links))
    steps = (1 if kind == ALL_GATHER else 2) * (group.num_ranks - 1)
    passes = 2 if kind == ALL_REDUCE else 1
    received_bytes = passes * size_bytes * (group.num_ranks - 1) / group.num_ranks
    byte_factor = {ALL_GATHER: 1.0, REDUCE_SCATTER: gloo.reduce_scatter, ALL_REDUCE: gloo.reduce}[kind]
    step_s = gloo.step_us * 1e-6 * (links.latency if group.nodes > 1 else 1.0)
    return steps * step_s + received_bytes * byte_factor * _compute_seconds_per_byte(group, links)


def _compute_seconds_per_byte(group: CollectiveGroup, links: LinkSpeeds) -> float:
    """Of what each rank receives, on the narrowest link of the ring.

    All rings together carry what one rank receives into each node, so a node's adapters serve the group as one link;
    a group with fewer ranks in a node than the node has adapters reaches as many as it has ranks. Where one rank of a
    group is in each node, nothing passes inside them.
    """
    node_s_per_byte = _compute_node_seconds_per_byte(group, links)
    if group.nodes == 1:
        return node_s_per_byte
    network_s_per_byte = _compute_network_seconds_per_byte(group, links)
    return max(node_s_per_byte, network_s_per_byte) if group.ranks_per_node > 1 else network_s_per_byte


def _compute_node_seconds_per_byte(group: CollectiveGroup, links: LinkSpeeds) -> float:
    """Of the links inside a node, for as many GPUs of the group as one has; 0 where it has one."""
    num_gpus = min(group.num_ranks, group.ranks_per_node)
    if num_gpus == 1:
        return 0.0
    return 1 / (links.compute_reached_gb_s(num_gpus) * 1e9)


def _compute_network_seconds_per_byte(group: CollectiveGroup, links: LinkSpeeds) -> float:
    """Of a node's adapters, as many of them as the group reaches and others leave it."""
    adapter_share = min(1.0, min(group.num_ranks, group.ranks_per_node) / links.adapters, 1 / group.concurrent_groups)
    network_s_per_byte = 1 / (links.node_gb_s * links.node_efficiency * adapter_share * 1e9)
    return network_s_per_byte * (1 + links.congestion * math.log2(group.nodes / 2))
