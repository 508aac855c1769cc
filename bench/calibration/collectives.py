"""Time collectives among real processes: all-gather, reduce-scatter and all-reduce, over message sizes and groups.

As nccl-tests does (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), several collectives in a row
are timed together where one is short, and a repetition takes as long as its slowest rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.calibration.sample import COLLECTIVE, CalibrationSample
from bench.core.errors import UsageError
from bench.prediction.cost.collectives import ALL_GATHER, ALL_REDUCE, CALIBRATED_COLLECTIVES, REDUCE_SCATTER

MIN_MESSAGE_BYTES = 2**10
MAX_MESSAGE_BYTES = {"cpu": 2**26, "cuda": 2**30}
MESSAGE_GROWTH = 4
"""From one message size to the next."""

REFERENCE_BYTES = 2**20
"""Of the all-reduce that is timed once more at the end, to see whether the machine is still the same."""

MIN_TIMED_S = 4e-3
"""Collectives in a row are timed together until they take so long."""

REPETITION_BUDGET_S, QUICK_REPETITION_BUDGET_S = 0.5, 0.06
"""Time for the repetitions of one collective at one size."""

REPETITION_RANGE, QUICK_REPETITION_RANGE = (8, 100), (5, 20)
"""At least and at most."""

MAX_FP32_SUM = 1e30
"""To which sums of sums may grow within a stretch, in fp32."""

LAUNCH_HEAD_START_S = 1e-4
"""For each launch: by so much the host runs ahead of a GPU, so that it does not wait for launches."""

ASSUMED_GPU_CLOCK_HZ = 2e9
"""No slower does a GPU count the cycles it is told to wait: more only make the head start shorter."""


@dataclass(frozen=True)
class GroupLayout:
    """One way to divide the ranks into groups that communicate at the same time."""

    label: str
    groups: tuple[tuple[int, ...], ...]
    ranks_per_node: int
    """Of each group."""

    @property
    def ranks(self) -> int:
        return len(self.groups[0])


def list_group_layouts(ranks: int, ranks_per_node: int) -> list[GroupLayout]:
    """The groups that strategies communicate in: a node, everybody, one rank of each node, half a node."""
    nodes, all_ranks = ranks // ranks_per_node, range(ranks)
    layouts = []
    if nodes > 1:
        layouts.append(GroupLayout("all ranks", (tuple(all_ranks),), ranks_per_node))
    if nodes > 1 and ranks_per_node > 1:
        layouts.append(GroupLayout("one rank per node", (tuple(all_ranks[::ranks_per_node]),), 1))
    if ranks_per_node > 1:
        layouts.append(GroupLayout("the ranks of a node", _divide_ranks(ranks, ranks_per_node), ranks_per_node))
    if ranks_per_node >= 4 and ranks_per_node % 2 == 0:
        half_node = ranks_per_node // 2
        layouts.append(GroupLayout("half the ranks of a node", _divide_ranks(ranks, half_node), half_node))
    return layouts


def _divide_ranks(ranks: int, group_size: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours, `group_size` to a group."""
    return tuple(tuple(range(first_rank, first_rank + group_size)) for first_rank in range(0, ranks, group_size))


def list_message_sizes(device_type: str, *, quick: bool) -> list[int]:
    """Bytes of the whole message, from a kibibyte up."""
    largest_bytes = MAX_MESSAGE_BYTES[device_type] // (MESSAGE_GROWTH if quick else 1)
    growth_steps = round(math.log(largest_bytes / MIN_MESSAGE_BYTES, MESSAGE_GROWTH))
    return [MIN_MESSAGE_BYTES * MESSAGE_GROWTH**step for step in range(0, growth_steps + 1, 2 if quick else 1)]


def measure_collectives(
    device: torch.device, host: str, *, quick: bool, on_progress: Callable[[str], None]
) -> list[CalibrationSample]:
    """Time every collective in every group shape at every size; all ranks call this alike, and all get the samples.

    Parameters
    ----------
    device: torch.device
        The rank's own, which the default process group communicates from.
    host: str
        Name of the machine the rank is on: ranks on one machine are a node.
    quick: bool
        Fewer sizes and repetitions.
    on_progress: callable
        Told in a few words what is timed next.

    Raises
    ------
    UsageError
        If nodes have different numbers of ranks, or ranks are not numbered node by node.
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    layouts = list_group_layouts(len(hosts), count_ranks_per_node(hosts))
    largest_bytes = max(list_message_sizes(device.type, quick=quick), default=0)
    timer = _CollectiveTimer(device, largest_bytes, quick)
    samples = []
    for layout in layouts:
        on_progress(f"collectives of {layout.ranks} ranks, {layout.label}")
        group = timer.create_group(layout)
        for kind in CALIBRATED_COLLECTIVES:
            samples += [
                timer.time_collective(kind, size_bytes, layout, group)
                for size_bytes in list_message_sizes(device.type, quick=quick)
            ]
        if layout is layouts[0]:
            first_group = group
    if layouts:
        samples.append(timer.time_collective(ALL_REDUCE, REFERENCE_BYTES, layouts[0], first_group))
    return samples


def count_ranks_per_node(hosts: list[str]) -> int:
    """Ranks on each machine, for the machine that each rank is on.

    Raises
    ------
    UsageError
        If they are not alike, node by node.
    """
    node_ranks = hosts.count(hosts[0])
    if (
        hosts != [hosts[first_rank] for first_rank in range(0, len(hosts), node_ranks) for _ in range(node_ranks)]
        or len(set(hosts)) != len(hosts) // node_ranks
    ):
        raise UsageError(
            f"ranks are on {', '.join(hosts)}: start equally many on every node, numbered node by node "
            "(srun --ntasks-per-node=N, torchrun --nproc-per-node=N)."
        )
    return node_ranks


class _CollectiveTimer:
    """Buffers of one rank, and how collectives on them are timed."""

    def __init__(self, device: torch.device, largest_bytes: int, quick: bool) -> None:
        self._device = device
        self._full_buffer = torch.randn(largest_bytes // 4, device=device)
        self._initial_values = self._full_buffer.clone()
        self._shard_buffer = torch.randn(largest_bytes // 8, device=device)
        self._budget_s = QUICK_REPETITION_BUDGET_S if quick else REPETITION_BUDGET_S
        self._repetition_range = QUICK_REPETITION_RANGE if quick else REPETITION_RANGE

    def create_group(self, layout: GroupLayout) -> dist.ProcessGroup | None:
        """This rank's group of a shape, None if it is in none. All ranks open all groups, in one order."""
        own_group = None
        for members in layout.groups:
            group = dist.new_group(list(members))
            if dist.get_rank() in members:
                own_group = group
        return own_group

    def time_collective(
        self, kind: str, size_bytes: int, layout: GroupLayout, group: dist.ProcessGroup | None
    ) -> CalibrationSample:
        """Time one collective; the time of each repetition is that of its slowest rank."""
        elements = max(1, size_bytes // 4 // layout.ranks) * layout.ranks
        full_tensor, shard_tensor = self._full_buffer[:elements], self._shard_buffer[: elements // layout.ranks]
        collective = _bind_collective(kind, full_tensor, shard_tensor, group)
        max_calls = int(math.log(MAX_FP32_SUM) / math.log(layout.ranks)) if kind == ALL_REDUCE else 1000

        def time_stretch(calls: int) -> float:
            if kind == ALL_REDUCE:
                full_tensor.copy_(self._initial_values[:elements])
            return self._time_calls(collective, calls)

        for _ in range(2):
            time_stretch(1)
        pilot_seconds = self._reduce_to_slowest([time_stretch(1) for _ in range(3)])
        call_s = min(pilot_seconds)
        calls = max(1, min(max_calls, math.ceil(MIN_TIMED_S / call_s)))
        min_repetitions, max_repetitions = self._repetition_range
        repetitions = max(min_repetitions, min(max_repetitions, int(self._budget_s / (calls * call_s))))
        seconds = self._reduce_to_slowest([time_stretch(calls) / calls for _ in range(repetitions)])
        return CalibrationSample(
            kind=COLLECTIVE,
            name=kind,
            format="bytes",
            dims=(elements,),
            flops=0.0,
            bytes_moved=4.0 * elements,
            seconds=tuple(seconds),
            ranks=layout.ranks,
            ranks_per_node=layout.ranks_per_node,
        )

    def _time_calls(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of some calls in a row on this rank."""
        if self._device.type == "cpu":
            start_s = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - start_s
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(calls * LAUNCH_HEAD_START_S * ASSUMED_GPU_CLOCK_HZ))
        call()  # waits for the rank that woke last
        start_event.record()
        for _ in range(calls):
            call()
        end_event.record()
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event)) / 1000

    def _reduce_to_slowest(self, seconds: list[float]) -> list[float]:
        """Times of all ranks to those of the slowest, which nobody of those outside a group is."""
        slowest_seconds = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest_seconds, dist.ReduceOp.MAX)
        return [float(value) for value in slowest_seconds]


def _bind_collective(
    kind: str, full_tensor: torch.Tensor, shard_tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    """One collective on these tensors; nothing, for a rank outside the group."""
    if group is None:
        return lambda: None
    # Renamed in torch 2.13.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        ALL_GATHER: lambda: all_gather(full_tensor, shard_tensor, group=group),
        REDUCE_SCATTER: lambda: reduce_scatter(shard_tensor, full_tensor, group=group),
        ALL_REDUCE: lambda: dist.all_reduce(full_tensor, group=group),
    }[kind]
